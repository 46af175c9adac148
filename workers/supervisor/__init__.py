"""The supervisor process: it follows endpoints and objects, scrapes metrics, and serves the pages and the health check.

It is the only writer of the endpoint table, the documents and the prefix index, which workers read. Start reading in `main`.
"""
