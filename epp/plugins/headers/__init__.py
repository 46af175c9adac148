"""Request-header plugins read facts about a request from its headers."""
