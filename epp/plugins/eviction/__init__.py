"""In-flight eviction decides which requests that are being served may be ended, and which of them is ended first."""
