"""Drawn figures: an embedded data set of key points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Parts
from lit_fed.data.population.base import Batches, Subset
from lit_fed.data.population.new_inputs import NewInputs
from lit_fed.data.pose.augmentation import FLIP_ONLY, PoseAugmentation
from lit_fed.data.pose.figures import HEIGHT, WIDTH, figure_picture
from lit_fed.data.pose.files import photograph_loader
from lit_fed.data.pose.module import PoseDataModule
from lit_fed.data.pose.people import People, PeopleLoader
from lit_fed.data.pose.skeleton import LSP


class Puppets(PoseDataModule):
    """Synthetic: articulated figures with 14 joints, drawn on 128×96 pixels. No photographs, no persons, no files.

    Figures differ in pose, size, clothes and light, face the viewer or turn their back, and stand before soft colours,
    among shapes, sometimes beside another figure or behind something. At 64×48 pixels a pose is recognisable, at 32×24
    hands and feet get lost. Left and right look alike, as on photographs; face or rucksack tell them apart.

    A figure is a function of `figure_seed` and its number, drawn once per process in about 2 ms. Joints off the canvas
    are not visible, hidden joints are; `head_size` is the distance from neck to head top.

    Args:
        resolutions: [height, width] of each level, the highest first; a pixel is a mean of the canvas's pixels.
        samples_per_client: Training figures per client.
        test_samples: Figures to test on.
        figure_seed: Seed of the figures.
        augmentation: Random boxes to train on; null mirrors every second picture, and nothing else.
        kwargs: See `PoseDataModule`.

    Raises:
        ConfigError: A setting is out of range.
    """

    skeleton = LSP
    padding = 1.0  # a figure fills its canvas

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
        check_range("data.test_samples", test_samples, least=1)
        self.test_samples, self.figure_seed = test_samples, figure_seed
        self._canvases: dict[Subset, torch.Tensor] = {}
        self._people: dict[Subset, dict[str, torch.Tensor]] = {}
        self._kept: dict[Subset, IntArray] = {}  # the figures still here, if some were freed
        self._device = torch.device("cpu")

    @override
    def default_augmentation(self) -> PoseAugmentation:
        return FLIP_ONLY

    @override
    def pooled(self) -> None:
        """Nothing: figures are drawn from a seed, and are nobody's."""

    @override
    def read_parts(self) -> Parts:
        people = {}
        for subset, count in _parts(self.max_train_samples or 0, self.test_samples):
            canvases, joints = drawn(self.figure_seed, subset, count)
            people[subset] = _people(joints, subset)
            self._canvases[subset] = torch.from_numpy(canvases).to(self._device)
            self._people[subset] = people[subset].tensors()
        return self._measured(people["train"], people["test"])

    @override
    def read_contents(self) -> Iterator[NDArray[Any]]:
        """All joints."""
        yield from (self._people[subset]["keypoints"].numpy() for subset in ("train", "test"))

    @override
    def keep(self, train: IntArray, test: IntArray) -> None:
        kept: tuple[tuple[Subset, IntArray], ...] = (("train", train), ("test", test))
        for subset, rows in kept:
            if len(rows) < len(self._canvases[subset]):
                chosen = torch.from_numpy(rows)
                self._canvases[subset] = self._canvases[subset].index_select(0, chosen.to(self._device))
                self._people[subset] = {name: array[chosen] for name, array in self._people[subset].items()}
                self._kept[subset] = rows

    @override
    def stored_people(self, subset: Subset, rows: IntArray) -> People:
        chosen = self._stored(subset, rows)
        arrays: dict[str, Any] = {name: array[chosen].numpy() for name, array in self._people[subset].items()}
        return People(**arrays)

    @override
    def stored_image(self, subset: Subset, row: int) -> NDArray[np.uint8]:
        canvas = self._canvases[subset][int(self._stored(subset, np.array([row]))[0])]
        return canvas.cpu().numpy().transpose(1, 2, 0)

    @override
    def image_of(self, number: int) -> tuple[int, str, Callable[[], NDArray[np.uint8]]]:
        return number, f"figure {number}", partial(self.stored_image, "test", number)

    @override
    def new_inputs(self, path: Path) -> NewInputs:
        """Photographs, whole or with boxes, see `photograph_loader`."""
        return photograph_loader(self, path, 0, self._device)

    @override
    def write_image(self, subset: Subset, row: int, stem: Path) -> str:
        path = stem.with_suffix(".png")
        Image.fromarray(np.ascontiguousarray(self.stored_image(subset, row))).save(path)
        return path.name

    @override
    def move_to(self, device: torch.device) -> None:
        self._device = torch.device(device)
        self._canvases = {subset: canvases.to(device) for subset, canvases in self._canvases.items()}

    @override
    def make_loader(self, batches: Batches) -> PeopleLoader:
        height, width = self.resolutions[0]
        return PeopleLoader(
            self._canvases[batches.subset],
            self._people[batches.subset],
            self._stored(batches.subset, batches.indices),
            batches.batch_size,
            batches.generator,
            self.augmentation if batches.training else None,
            self.skeleton.upper,
            width / height,
            drop_last=batches.training and self.drop_last,
            fresh=batches.training and self.fresh_batches,
        )

    @override
    def make_public_loader(self, batches: Batches) -> PeopleLoader:
        return PeopleLoader(
            self._canvases["train"],
            self._people["train"],
            self._stored("train", batches.indices),
            batches.batch_size,
            batches.generator,
            public=True,
        )

    def _stored(self, subset: Subset, indices: IntArray) -> torch.Tensor:
        """Rows of figures in the tensors."""
        rows = np.searchsorted(self._kept[subset], indices) if subset in self._kept else indices
        return torch.from_numpy(np.asarray(rows, dtype=np.int64))


@lru_cache(maxsize=4)
def drawn(seed: int, part: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draw the first figures of a part of a set: pictures (count, 3, 128, 96) and joints (count, 14, 2), pixels (x, y).

    The arrays are cached and must not be changed.
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
