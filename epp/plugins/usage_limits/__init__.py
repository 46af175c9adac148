"""Usage-limit policies: up to which saturation each band is served."""
