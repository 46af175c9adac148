"""The decision on a request: the pipeline of plugins, and what explains it. Start reading at `decide.py`.

May import: epp.request, epp.points, epp.endpoints. Imported by: epp.config, workers.
"""
