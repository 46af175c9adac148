"""Data that processes exchange: documents, the bus to the index writer, objectives, recent decisions, queries of death."""
