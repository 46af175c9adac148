"""The ext_proc protocol: codec, order of messages, refusals, scanning of responses. The package converts bytes to values and back.

May import: words, values and extension points of epp. Imported by: the rows of epp above it, workers, and loadtest (the codec).
"""
