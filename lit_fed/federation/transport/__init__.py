"""A gRPC stream from each node to the server, with certificates at both ends."""
