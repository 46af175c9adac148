"""Pages over HTTP: the server, which sends long pages in pieces, and the pages about metrics, flow control and decisions.

May import: extproc and all packages below it. Imported by: kube and all packages above it.
"""
