"""Screeners restrict the candidates of all profiles."""
