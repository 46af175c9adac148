"""The decision on a request: the pipeline of plugins, and what explains it. Start reading at `decide.py`."""
