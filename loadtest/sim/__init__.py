"""The simulated model servers. They see the picker only from outside.

May import: the messages of epp.protocol. Imported by: tests, which start most of them as processes.
"""
