"""Persons with key points, at a resolution per client."""

from lit_fed.data.pose.annotated import CocoKeypoints, Mpii
from lit_fed.data.pose.client_poses import ClientPoses, pose_settings_of, write_pose_folders
from lit_fed.data.pose.files import PhotoPose
from lit_fed.data.pose.module import PoseDataModule
from lit_fed.data.pose.people import LSP, MPII, Album, People, Skeleton
from lit_fed.data.pose.puppets import Puppets
from lit_fed.data.pose.warp import FLIP_ONLY, Boxes, PoseAugmentation, PoseView

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
