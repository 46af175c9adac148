"""Usage-limit policies set the ceiling of each band: the saturation up to which the band is served."""
