"""Fairness policies: whose turn it is among the flows of a band.

They are told of every change and keep their order, so that a pick looks at the first and not at all.
"""
