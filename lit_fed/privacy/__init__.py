"""Differential privacy around a method: of a client with all its data, or of every sample of a client."""

from lit_fed.privacy.client_level import ClientLevel
from lit_fed.privacy.sample_level import SampleLevel
from lit_fed.privacy.secure_sum import SecureSum

__all__ = ["ClientLevel", "SampleLevel", "SecureSum"]
