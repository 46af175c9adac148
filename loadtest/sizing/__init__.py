"""`epp size`: cores, memory and flags for a load."""
