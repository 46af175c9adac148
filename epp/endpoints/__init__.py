"""What the picker knows about model servers beyond their columns: labels, topology, roles, pressure, failures.

May import: compiled, epp.candidates, epp.data. Imported by: plugins, epp.decision, workers.
"""
