"""Load and model servers for trying the picker, which is seen from outside only, as by Envoy.

Nothing in this package imports `shm`, `workers` or the domain part of `epp`.
"""
