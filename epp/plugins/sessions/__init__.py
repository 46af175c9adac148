"""Session affinity keeps requests of one client session on one endpoint."""
