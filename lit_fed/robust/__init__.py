"""Robust aggregation and attacks around any method whose reducer is a mean of client updates."""

from lit_fed.robust.aggregation import (
    NNM,
    Bucketing,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBounding,
    PreAggregation,
    RobustRule,
    TrimmedMean,
)
from lit_fed.robust.attack import ALIE, Backdoor, GaussianNoise, InnerProduct, LabelFlip, Mimic, Scaling, SignFlip
from lit_fed.robust.backdoor_test import BackdoorTest

__all__ = [
    "ALIE",
    "NNM",
    "Backdoor",
    "BackdoorTest",
    "Bucketing",
    "CentredClipping",
    "GaussianNoise",
    "GeometricMedian",
    "InnerProduct",
    "Krum",
    "LabelFlip",
    "Median",
    "Mimic",
    "MultiKrum",
    "NormBounding",
    "PreAggregation",
    "RobustRule",
    "Scaling",
    "SignFlip",
    "TrimmedMean",
]
