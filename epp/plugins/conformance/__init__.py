"""Plugins for the conformance tests of gateways: the test selects the endpoint, and learns which endpoint served."""
