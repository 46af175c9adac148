"""HTTP/2 and gRPC servers: turn the bytes of a connection into whole messages, and answers into bytes."""
