"""Persons with key points, at a resolution per client."""

from lit_fed.poses.data.annotated import CocoKeypoints, Mpii
from lit_fed.poses.data.client_poses import ClientPoses, pose_settings_of, write_pose_folders
from lit_fed.poses.data.files import PhotoPose
from lit_fed.poses.data.module import PoseDataModule
from lit_fed.poses.data.people import LSP, MPII, Album, People, Skeleton
from lit_fed.poses.data.puppets import Puppets
from lit_fed.poses.data.warp import FLIP_ONLY, Boxes, PoseAugmentation, PoseView

__all__ = [
    "FLIP_ONLY",
    "LSP",
    "MPII",
    "Album",
    "Boxes",
    "ClientPoses",
    "CocoKeypoints",
    "Mpii",
    "People",
    "PhotoPose",
    "PoseAugmentation",
    "PoseDataModule",
    "PoseView",
    "Puppets",
    "Skeleton",
    "pose_settings_of",
    "write_pose_folders",
]
