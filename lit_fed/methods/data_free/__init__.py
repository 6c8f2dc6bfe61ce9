"""Methods that distil without data: a generator on the server makes samples that no client has."""

from lit_fed.methods.data_free.fedgen import FedGen

__all__ = ["FedGen"]
