"""A federation over several machines: the same rounds, with clients that live where their data are."""
