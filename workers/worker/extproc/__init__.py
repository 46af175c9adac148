"""Serves ext_proc streams: each stream's request phase and response phase join the transport with the decision in `epp`."""
