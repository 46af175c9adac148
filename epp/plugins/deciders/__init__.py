"""Deciders decide whether a stage of a disaggregated request runs on its own server."""
