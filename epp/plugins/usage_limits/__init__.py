"""Usage-limit policies set the saturation up to which each band is served."""
