"""Cohorts of clients, and the fate of their work."""

from lit_fed.participation.base import Fate, Participant, Participation, ProbabilityIs, Stragglers
from lit_fed.participation.samplers import (
    PROBABILITY_DRAWS,
    AvailabilityParticipation,
    FullParticipation,
    SampledParticipation,
    UniformParticipation,
    WeightedParticipation,
)

__all__ = [
    "PROBABILITY_DRAWS",
    "AvailabilityParticipation",
    "Fate",
    "FullParticipation",
    "Participant",
    "Participation",
    "ProbabilityIs",
    "SampledParticipation",
    "Stragglers",
    "UniformParticipation",
    "WeightedParticipation",
]
