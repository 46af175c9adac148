"""HTTP/2 + gRPC on the server's side: bytes of a connection in, whole messages out, and back."""
