"""Persons with key points, at a resolution per client."""

from lit_fed.data.pose.augmentation import FLIP_ONLY, PoseAugmentation
from lit_fed.data.pose.client_poses import ClientPoses
from lit_fed.data.pose.coco import CocoKeypoints
from lit_fed.data.pose.files import PhotoPose
from lit_fed.data.pose.module import PoseDataModule
from lit_fed.data.pose.mpii import Mpii
from lit_fed.data.pose.people import Album, People
from lit_fed.data.pose.puppets import Puppets
from lit_fed.data.pose.skeleton import LSP, MPII, Skeleton
from lit_fed.data.pose.split import pose_settings_of, write_pose_folders
from lit_fed.data.pose.warp import Boxes, PoseView

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
