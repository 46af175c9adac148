"""Data sources and extractors fetch metrics pages and read columns from them."""
