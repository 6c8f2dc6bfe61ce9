"""Certificates and keys of the ends, and the clients that a key may claim."""
