"""Processes and the outside world: the only package that waits, opens and forks.

Start reading at `parent.py` (who starts whom) and `worker.py` (what serves a stream).
"""
