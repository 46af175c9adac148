"""A worker process: serves ext_proc streams from one event loop, and drains before it ends.

Start reading in `main`. `setup` creates the objects that decide on requests.
"""
