"""The record of a run: hashes of all that its rounds sent, received and made of it, and what checks them."""
