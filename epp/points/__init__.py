"""The extension points: what plugins implement, how they are registered, guarded and timed.

May import: epp.request, epp.candidates. Imported by: plugins, epp.decision, workers.
"""
