"""What tests of privacy share."""

from typing import Any

from lit_fed.methods import FedAvg
from lit_fed.participation import FullParticipation
from lit_fed.privacy import ClientLevel


def private(clip_norm: float = 0.5, noise_multiplier: float | None = 0.0, **kwargs: Any) -> dict[str, Any]:
    """A trainer's settings for privacy in which everybody takes part."""
    return {
        "privacy": ClientLevel(clip_norm, noise_multiplier, delta=0.01, **kwargs),
        "participation": FullParticipation(),
    }


def uniform() -> FedAvg:
    """FedAvg in which clients weigh the same."""
    return FedAvg(weighting="uniform")
