"""Cohorts of clients, and the fate of their work."""

from lit_fed.participation.asynchronous import Asynchronous
from lit_fed.participation.base import CLOCK, Fate, Participant, Participation, ProbabilityIs, Stragglers
from lit_fed.participation.samplers import (
    PROBABILITY_DRAWS,
    AvailabilityParticipation,
    FullParticipation,
    PoissonParticipation,
    SampledParticipation,
    UniformParticipation,
    WeightedParticipation,
)
from lit_fed.participation.speeds import Speeds

__all__ = [
    "CLOCK",
    "PROBABILITY_DRAWS",
    "Asynchronous",
    "AvailabilityParticipation",
    "Fate",
    "FullParticipation",
    "Participant",
    "Participation",
    "PoissonParticipation",
    "ProbabilityIs",
    "SampledParticipation",
    "Speeds",
    "Stragglers",
    "UniformParticipation",
    "WeightedParticipation",
]
