"""Data that processes exchange: documents, the bus to the index writer, objectives, recent decisions, queries of death.

May import: transport and all below it. Imported by: replicas and all above it.
"""
