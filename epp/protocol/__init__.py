"""The ext_proc protocol: codec, order of messages, refusals, scanning of responses. The package converts bytes to values and back."""
