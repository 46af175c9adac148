"""Fairness policies decide which flow of a band has the next turn.

A policy is told of every change of a flow, and keeps the flows in order, so that a pick looks only at the first flow.
"""
