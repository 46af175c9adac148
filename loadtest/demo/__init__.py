"""The parts of `epp demo`: Envoy, simulated model servers, a picker, users who chat, and a live view."""
