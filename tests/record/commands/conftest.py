"""Certificates and keys, as of tests of the federation."""

from tests.federation.conftest import keys

__all__ = ["keys"]
