"""Saturation detectors: how full the pool is. In a profile they are filters too: who has room."""
