"""Differential privacy around any method whose reducer is a mean of client updates."""

from lit_fed.privacy.client_level import ClientLevel

__all__ = ["ClientLevel"]
