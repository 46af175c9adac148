"""Discovery plugins say where the list of endpoints comes from."""
