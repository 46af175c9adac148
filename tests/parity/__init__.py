"""The dated list of what the reference picker offers, its page, and what the code has of it."""
