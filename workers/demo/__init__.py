"""What `epp demo` is made of: an Envoy, simulated model servers, a picker, users who chat, and a live view of them."""
