"""What the field's conformance tests of gateways need: an endpoint chosen by the test, and the gateway's word of who served."""
