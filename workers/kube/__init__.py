"""The client of the Kubernetes API, and the modules that use it: pods, pools, objects, leases, token reviews.

May import: pages and all packages below it. Imported by: kv_events and all packages above it.
"""
