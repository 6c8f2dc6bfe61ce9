"""Key points of persons: data at a resolution per client, networks of heatmaps, their losses, task and metrics."""

from lit_fed.networks.registry import POSE_NETWORKS
from lit_fed.poses.data.annotated import CocoKeypoints, Mpii
from lit_fed.poses.data.client_poses import ClientPoses
from lit_fed.poses.data.files import PhotoPose
from lit_fed.poses.data.module import PoseDataModule
from lit_fed.poses.data.people import Skeleton
from lit_fed.poses.data.puppets import Puppets
from lit_fed.poses.data.warp import PoseAugmentation
from lit_fed.poses.heatmaps import MSRA, UDP, HeatmapCodec, dark, gaussian_maps, peaks, quarter_offset
from lit_fed.poses.keypoint_estimator import KeypointEstimator
from lit_fed.poses.metrics import PCK, KeypointAP, PCKh
from lit_fed.poses.segmenter import Segmenter

__all__ = [
    "MSRA",
    "PCK",
    "POSE_NETWORKS",
    "UDP",
    "ClientPoses",
    "CocoKeypoints",
    "HeatmapCodec",
    "KeypointAP",
    "KeypointEstimator",
    "Mpii",
    "PCKh",
    "PhotoPose",
    "PoseAugmentation",
    "PoseDataModule",
    "Puppets",
    "Segmenter",
    "Skeleton",
    "dark",
    "gaussian_maps",
    "peaks",
    "quarter_offset",
]
