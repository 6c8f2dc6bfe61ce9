"""An embedded data set of drawn figures: key points without any file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Strata
from lit_fed.data.population.base import Subset
from lit_fed.data.pose.augmentation import FLIP_ONLY, PoseAugmentation
from lit_fed.data.pose.figures import HEIGHT, WIDTH, figure_picture
from lit_fed.data.pose.module import PoseDataModule
from lit_fed.data.pose.people import People
from lit_fed.data.pose.people_loader import PeopleLoader
from lit_fed.data.pose.skeleton import LSP
from lit_fed.errors import ConfigError


class Puppets(PoseDataModule):
    """Synthetic: articulated figures with 14 joints, drawn on 128×96 pixels. No photographs, no persons, no files.

    Figures differ in pose, size, clothes and light, are seen from the front or from behind, and stand before soft
    colours, among shapes, sometimes beside another figure or behind something. At 64×48 pixels a pose can be seen, at
    32×24 hands and feet get lost. Left and right look alike, as on photographs: face or rucksack tell them apart.

    A figure follows from `figure_seed` and its number alone, and is drawn once a process, in about 2 ms. Joints that
    leave the canvas are not visible, hidden ones are; `head_size` is the distance from neck to head top.

    Args:
        resolutions: [height, width] of each level, the highest first; pixels are means of the canvas's.
        samples_per_client: Training figures for each client.
        test_samples: Figures to test on.
        figure_seed: Another one gives other figures.
        augmentation: Random boxes to train on; none given mirrors one picture in two, and nothing else.
        kwargs: See `PoseDataModule`.

    Raises:
        ConfigError: A setting is out of range.
    """

    skeleton = LSP

    def __init__(
        self,
        resolutions: Sequence[tuple[int, int]] = ((64, 48), (48, 36), (32, 24)),
        samples_per_client: int = 300,
        test_samples: int = 300,
        figure_seed: int = 0,
        augmentation: PoseAugmentation | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            resolutions=resolutions,
            samples_per_client=samples_per_client,
            augmentation=augmentation,
            antialias=True,
            mean=(0.5,),
            std=(0.25,),
            **kwargs,
        )
        if test_samples < 1:
            raise ConfigError(f"data.test_samples is {test_samples}: it must be at least 1")
        self.test_samples, self.figure_seed = test_samples, figure_seed
        self._canvases: dict[Subset, torch.Tensor] = {}
        self._people: dict[Subset, dict[str, torch.Tensor]] = {}
        self._kept: dict[Subset, IntArray] = {}  # the figures that were kept, where not all were
        self._device = torch.device("cpu")

    def default_augmentation(self) -> PoseAugmentation:
        """Mirrors one picture in two."""
        return FLIP_ONLY

    def read_strata(self) -> Strata:
        """See `FederatedDataModule.read_strata`."""
        people = {}
        for subset, count in _parts(self.max_train_samples or 0, self.test_samples):
            canvases, joints = drawn(self.figure_seed, subset, count)
            people[subset] = _people(joints, subset)
            self._canvases[subset] = torch.from_numpy(canvases).to(self._device)
            self._people[subset] = people[subset].tensors()
        return self._strata_of(people["train"], people["test"])

    def read_contents(self) -> Iterator[NDArray[Any]]:
        """Where all joints are; see `DescribedPopulation.read_contents`."""
        yield from (self._people[subset]["keypoints"].numpy() for subset in ("train", "test"))

    def keep(self, train: IntArray, test: IntArray) -> None:
        """Forget all other figures, so that they take no memory."""
        kept: tuple[tuple[Subset, IntArray], ...] = (("train", train), ("test", test))
        for subset, rows in kept:
            if len(rows) < len(self._canvases[subset]):
                chosen = torch.from_numpy(rows)
                self._canvases[subset] = self._canvases[subset].index_select(0, chosen.to(self._device))
                self._people[subset] = {name: array[chosen] for name, array in self._people[subset].items()}
                self._kept[subset] = rows

    def move_to(self, device: torch.device) -> None:
        """Move the pictures to a device."""
        self._device = torch.device(device)
        self._canvases = {subset: canvases.to(device) for subset, canvases in self._canvases.items()}

    def make_loader(
        self,
        subset: Subset,
        indices: IntArray,
        *,
        batch_size: int,
        generator: torch.Generator | None = None,
        training: bool = False,
    ) -> PeopleLoader:
        """See `FederatedDataModule.make_loader`."""
        height, width = self.resolutions[0]
        return PeopleLoader(
            self._canvases[subset],
            self._people[subset],
            self._stored(subset, indices),
            batch_size,
            generator,
            self.augmentation if training else None,
            self.skeleton.upper,
            width / height,
            drop_last=training and self.drop_last,
        )

    def make_public_loader(
        self, indices: IntArray, *, batch_size: int, generator: torch.Generator | None
    ) -> PeopleLoader:
        """See `FederatedDataModule.make_public_loader`."""
        rows = self._stored("train", indices)
        return PeopleLoader(self._canvases["train"], self._people["train"], rows, batch_size, generator, public=True)

    def _stored(self, subset: Subset, indices: IntArray) -> torch.Tensor:
        """Where figures are, after some were forgotten."""
        rows = np.searchsorted(self._kept[subset], indices) if subset in self._kept else indices
        return torch.from_numpy(np.asarray(rows, dtype=np.int64))


@lru_cache(maxsize=4)
def drawn(seed: int, part: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draw the first figures of a part of a set; remembered for the next who asks, who must not change them.

    Args:
        seed: Of the set.
        part: Which part.
        count: How many.

    Returns:
        Pictures (count, 3, 128, 96) and joints (count, 14, 2), pixels (x, y).
    """
    pictures = np.empty((count, 3, HEIGHT, WIDTH), dtype=np.uint8)
    joints = np.empty((count, len(LSP.joints), 2), dtype=np.float32)
    for index in range(count):
        pictures[index], joints[index] = figure_picture(seed, part, index)
    return pictures, joints


def _people(joints: NDArray[np.float32], part: str) -> People:
    count = len(joints)
    low, high = joints.min(axis=1), joints.max(axis=1)
    inside = np.all((joints >= -0.5) & (joints < np.array([WIDTH, HEIGHT]) - 0.5), axis=2)
    return People(
        keypoints=joints,
        visible=inside.astype(np.float32),
        head_size=np.linalg.norm(joints[:, 12] - joints[:, 13], axis=1).astype(np.float32),
        centre=np.full((count, 2), [(WIDTH - 1) / 2, (HEIGHT - 1) / 2], dtype=np.float32),
        extent=np.full(count, HEIGHT, dtype=np.float32),
        area=np.prod(high - low, axis=1).astype(np.float32),
        image_id=np.arange(count, dtype=np.int64),
        source=f"the drawn figures to {part}",
    )


def _parts(train: int, test: int) -> tuple[tuple[Subset, int], ...]:
    return ("train", train), ("test", test)
