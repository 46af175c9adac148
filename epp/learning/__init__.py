"""Learns the latencies of endpoints from the answers that pass through: pure code without plugins, processes or clocks.

Start reading in `model`. `choice` says what a prediction means for a decision, and what decides without one.

May import: words and values of epp. Imported by: the rows of epp above it, and workers.
"""
