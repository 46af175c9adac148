"""The kv-events process: follows what model servers publish about their KV caches, and keeps the index of held blocks.

It runs only if a precise prefix producer is configured. It alone writes the index of held blocks, the links and the streams document.
Workers read them. Start reading in `main`.
"""
