"""Load generators and simulated model servers for trying the picker. They see the picker from outside only, as Envoy does.

May import: the codec of epp.protocol and its messages. Imported by: tests; the demo starts its modules as processes.
"""
