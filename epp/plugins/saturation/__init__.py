"""Saturation detectors measure how full the pool is. As filters in a profile, they keep the endpoints that have room."""
