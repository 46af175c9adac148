"""In-flight eviction: which requests that are being served may be given up, and which of them goes first."""
