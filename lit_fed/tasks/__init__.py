"""Tasks: plain LightningModules, replaceable by any other."""

from lit_fed.tasks.classifier import Classifier
from lit_fed.tasks.keypoint_estimator import KeypointEstimator
from lit_fed.tasks.pose_metrics import PCK, KeypointAP, PCKh
from lit_fed.tasks.regressor import Regressor

__all__ = ["PCK", "Classifier", "KeypointAP", "KeypointEstimator", "PCKh", "Regressor"]
