"""Syncers share state between the replicas of a picker."""
