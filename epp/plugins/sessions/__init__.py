"""Sessions: requests of one client that belong together, and what keeps them on one endpoint."""
