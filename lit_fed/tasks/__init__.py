"""Tasks: plain LightningModules, replaceable by any other."""

from lit_fed.tasks.keypoint_estimator import KeypointEstimator
from lit_fed.tasks.on_network import Classifier, Regressor
from lit_fed.tasks.pose_metrics import PCK, KeypointAP, PCKh

__all__ = ["PCK", "Classifier", "KeypointAP", "KeypointEstimator", "PCKh", "Regressor"]
