"""Learns the latencies of endpoints from the answers that pass through: pure code without plugins, processes or clocks.

Start reading in `model`. `choice` turns predicted costs into scores, and has the rule for costs without predictions.
"""
