"""The client of the Kubernetes API, and the modules that use it: pods, pools, objects, leases, token reviews."""
