"""gRPC as kvrelay speaks it: words to bytes and back, one status table, channels and servers that agree."""
