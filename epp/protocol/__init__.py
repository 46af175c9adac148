"""The ext_proc protocol: codec, order of messages, refusals, response scanning."""
