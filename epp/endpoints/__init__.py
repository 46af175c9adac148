"""What the picker knows about model servers beyond their columns: labels, topology, roles, pressure, failures."""
