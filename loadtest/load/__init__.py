"""Load: a driver of ext_proc streams as a gateway sends them, and the users of locust."""
