"""Persons with key points, at a resolution per client."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.loaders.image_files import read_photograph
from lit_fed.data.loaders.transforms import Normalize, Step
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.partitions.partition import Natural
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.files import NewInputs, Records
from lit_fed.data.population.hooks import Subset
from lit_fed.data.population.pictures import MOST_CLIENTS, even_subset, label_axis, new_figure
from lit_fed.data.population.views import View
from lit_fed.errors import ConfigError
from lit_fed.poses.data.people import People, Posed, Skeleton, by_image, found_records, skeletons_picture
from lit_fed.poses.data.warp import Interpolation, Means, PoseAugmentation, PoseView, Size, checked_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PHOTOGRAPHS = 8  # in the picture beside predictions
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PoseDataModule(FederatedDataModule):
    """Persons with key points, one to a picture; each client sees them at its own resolution.

    A batch is a dictionary: ``image`` (B, 3, H, W), normalised; ``keypoints`` (B, K, 2), (x, y) in pixels of the
    picture, where 0 is the centre of the first pixel, also outside of it; ``visible`` (B, K), 1 for labelled joints,
    else 0; ``head_size`` (B,), PCKh's length in pixels of the picture, NaN if unknown; and ``levels``, a list. In
    training these are dictionaries of the same four at every level below the client's own, the highest first: each is a
    separate warp of the original image, with the same random box. In evaluation the list is empty, and ``center``
    (B, 2) and ``scale`` (B,) lead back: a point p is at center + scale·(p − ((W − 1)/2, (H − 1)/2)) of the original
    image, which ``image_id`` (B,) names; ``area`` (B,) is the person's, in square pixels of the picture, NaN if
    unknown.

    Shared and pooled sets are at the highest level, pooled training data also at all lower ones. `views` has every test
    resolution by its name, such as ``256x192``, and ``128x96_as_256x192_bicubic`` for pictures of the lowest level
    scaled to a test resolution.

    Args:
        resolutions: [height, width] of each level, the highest first, each smaller than the one before.
        clients_per_level: Clients with each level as their own, the first clients with the highest; null spreads
            `num_clients` evenly over the levels.
        num_clients: Clients in the population; null for one per level, or the sum of `clients_per_level`.
        samples_per_client: Training samples per client; null for all.
        input_sizes: Under `Natural`, [height, width] of a client's own level by its name; clients that are not listed
            have the highest level that is not taller than their median box, else the lowest.
        test_resolutions: Resolutions of evaluations, seen in training or not; null for `resolutions`.
        interpolations: Ways to scale the lowest level's pictures to each of the larger test resolutions: ``bilinear``,
            ``area``, ``bicubic``.
        augmentation: Random boxes to train on; null for the data set's own. Omitted settings take `PoseAugmentation`'s
            defaults.
        antialias: Take a picture's pixel as the mean of the image's pixels that it covers; false takes the bilinear
            value at its middle, as the papers' code does.
        mean: Per channel, or one number for all, of pixels scaled to [0, 1].
        std: Per channel, or one number for all.
        kwargs: The population's other settings, see `FederatedDataModule`.

    Raises:
        ConfigError: A setting is out of range, or settings contradict each other.
    """

    def __init__(
        self,
        resolutions: Sequence[tuple[int, int]] = ((256, 192), (192, 144), (128, 96)),
        clients_per_level: list[int] | None = None,
        num_clients: int | None = None,
        samples_per_client: int | None = None,
        input_sizes: dict[str, tuple[int, int]] | None = None,
        test_resolutions: list[tuple[int, int]] | None = None,
        interpolations: list[Interpolation] | None = None,
        augmentation: PoseAugmentation | None = None,
        antialias: bool = False,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        **kwargs: Any,
    ) -> None:
        self.resolutions = tuple(checked_size(size, "resolutions") for size in resolutions)
        _check_levels(self.resolutions)
        self._input_sizes = dict(input_sizes or {})
        for name, size in self._input_sizes.items():
            if tuple(size) not in self.resolutions:
                raise ConfigError(
                    f"data.input_sizes has {list(size)} for client {name}; it must be one of data.resolutions, "
                    f"{list(map(list, self.resolutions))}"
                )
        if isinstance(kwargs.get("partition"), Natural):
            if type(self).own_client_names is FederatedDataModule.own_client_names:
                name = type(self).__name__
                raise ConfigError(f"data.partition is Natural, and {name} does not name clients; choose IID")
            _refuse_simulated(clients_per_level, samples_per_client)
            counts = None
        else:
            if self._input_sizes:
                raise ConfigError("data.input_sizes is for data.partition Natural; set data.clients_per_level instead")
            counts = _clients_per_level(clients_per_level, num_clients, len(self.resolutions))
            num_clients = sum(counts)
        if samples_per_client is not None:
            check_range("data.samples_per_client", samples_per_client, least=1)
            if kwargs.get("max_train_samples") is not None:
                raise ConfigError("data.samples_per_client and data.max_train_samples exclude each other; give one")
            kwargs["max_train_samples"] = samples_per_client * (num_clients or 1)
        super().__init__(num_clients=num_clients, **kwargs)
        self.samples_per_client, self.antialias = samples_per_client, antialias
        self.clients_per_level = counts
        self._first_of_level = np.cumsum([0, *(counts or ())])
        self._levels = dict[int, int]()  # of the data set's own clients, known after `setup`
        asked = self.resolutions if test_resolutions is None else test_resolutions
        self.test_resolutions = tuple(checked_size(size, "test_resolutions") for size in asked)
        self.interpolations = tuple(interpolations or ())
        self.augmentation = self.default_augmentation() if augmentation is None else augmentation
        self.mean, self.std, self._normalize = tuple(mean), tuple(std), Normalize(mean, std)
        if self._normalize.num_channels not in (1, 3):
            raise ConfigError(f"data.mean has {len(mean)} values; give one, or one per colour")
        self.box_heights = (0.0, 0.0)
        """Least and median height of a box, in pixels of its image; known after `setup`."""
        self._made: dict[Any, PoseView] = {}

    padding: float = 1.25
    """Factor to enlarge the boxes of persons by."""

    # The data set; known without `setup`.

    @property
    @abstractmethod
    def skeleton(self) -> Skeleton:
        """The joints."""

    @abstractmethod
    def stored_people(self, subset: Subset, rows: IntArray) -> People:
        """Persons of a part of the data set by their rows (n,)."""

    @abstractmethod
    def stored_image(self, subset: Subset, row: int) -> NDArray[np.uint8]:
        """A person's image, shape (h, w, 3)."""

    @abstractmethod
    def image_of(self, number: int) -> tuple[int, str, Callable[[], NDArray[np.uint8]]]:
        """A test image by its `People.image_id`: its number and name in the data's files, and a function to read it."""

    @abstractmethod
    def write_image(self, subset: Subset, row: int, stem: Path) -> str:
        """Write a person's image without losses to `stem` with an ending; return the file's name."""

    def default_augmentation(self) -> PoseAugmentation:
        """The augmentation if none is set."""
        return PoseAugmentation()

    @property
    def num_joints(self) -> int:
        """Joints of a person, K."""
        return len(self.skeleton.joints)

    @property
    def joint_names(self) -> tuple[str, ...]:
        """Names of the joints."""
        return self.skeleton.joints

    coco_ap: bool = False
    """Whether COCO's AP is defined: the areas of persons are known."""

    @property
    def oks_sigmas(self) -> tuple[float, ...]:
        """σ of each joint for COCO's AP."""
        return self.skeleton.sigmas

    @property
    def flip_pairs(self) -> tuple[tuple[int, int], ...]:
        """Joints that swap in a mirror, by number."""
        return self.skeleton.flip_pairs

    @property
    def unscored_joints(self) -> tuple[int, ...]:
        """Joints that the data set's metric leaves out, by number."""
        return self.skeleton.unscored

    @property
    def skeleton_edges(self) -> tuple[tuple[int, int], ...]:
        """Joints to connect in pictures, by number."""
        return self.skeleton.edges

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a picture at the highest level."""
        return (3, *self.resolutions[0])

    @property
    @override
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all levels and all test resolutions."""
        return tuple((3, *size) for size in dict.fromkeys((*self.resolutions, *self.test_resolutions)))

    @property
    @override
    def output_shape(self) -> tuple[int, ...]:
        """(K, 2)."""
        return (self.num_joints, 2)

    @override
    def preprocessing(self) -> list[Step]:
        """The normalisation of pictures of any size."""
        return self._normalize.steps

    @override
    def stored_like(self) -> tuple[tuple[int, ...], str]:
        """Bytes at the highest level; any other size is possible, too."""
        return self.input_shape, "uint8"

    # Views.

    def level(self, client_id: int) -> int:
        """The client's own level, 0 for the highest; under `Natural` known after `setup`."""
        if self.clients_per_level is None:
            return self._levels[client_id]
        return int(np.searchsorted(self._first_of_level, client_id, side="right")) - 1

    @override
    def view(self, client_id: int) -> View:
        """The client's own level, in training with all below."""
        return self._made_view(self.resolutions[self.level(client_id) :])

    @override
    def shared_view(self) -> View:
        """The highest level, in training with all below."""
        return self._made_view(self.resolutions)

    @override
    def views(self) -> Mapping[str, View]:
        """Every test resolution, and the lowest level scaled to each larger one."""
        lowest = self.resolutions[-1]
        views: dict[str, View] = {named_size(size): self.view_of(size) for size in self.test_resolutions}
        for size in self.test_resolutions:
            if size[0] > lowest[0]:
                for way in self.interpolations:
                    views[f"{named_size(lowest)}_as_{named_size(size)}_{way}"] = self.view_of(lowest, size, way)
        return views

    @override
    def pictured(self) -> Mapping[str, Sequence[str]]:
        """``resolutions``, and ``interpolated``: the lowest level, unscaled and scaled to the highest level."""
        low, high = named_size(self.resolutions[-1]), named_size(self.resolutions[0])
        scaled = [name for name in self.views() if name.startswith(f"{low}_as_{high}_")]
        sizes = [named_size(size) for size in self.test_resolutions]
        return {"resolutions": sizes} | ({"interpolated": [low, *scaled]} if scaled and low in sizes else {})

    def view_of(self, size: Size, shown_as: Size | None = None, interpolation: Interpolation = "bilinear") -> PoseView:
        """The view of an evaluation at (H, W), its pictures scaled to `shown_as` if given.

        Raises:
            ConfigError: The two sizes differ in aspect.
        """
        if shown_as is not None and size[0] * shown_as[1] != size[1] * shown_as[0]:
            raise ConfigError(
                f"pictures of {named_size(size)} cannot be shown as {named_size(shown_as)}; "
                "choose a resolution of the same aspect"
            )
        return self._made_view((size,), shown_as, interpolation)

    def _made_view(
        self, sizes: tuple[Size, ...], shown_as: Size | None = None, way: Interpolation = "bilinear"
    ) -> PoseView:
        key = (sizes, shown_as, way)
        if key not in self._made:
            means, order = [self._means(size) for size in sizes], self.skeleton.flip_order
            self._made[key] = PoseView(sizes, means, self._normalize, order, shown_as, way)
        return self._made[key]

    def _means(self, size: Size) -> Means:
        """The downsampling: means of squares small enough for the smallest box, and points for the median box."""
        if not self.antialias:
            return Means()
        least, usual = self.box_heights
        whole = max(1, int(least * (1 - self.augmentation.scale) / size[0]))
        return Means(whole, max(1, math.ceil(usual / (whole * size[0]) - 1e-6)))

    def _learn_levels(self, heights: NDArray[np.float32], owners: IntArray) -> None:
        """Set the level of each of the data set's own clients, by `input_sizes` or by the median height of its boxes.

        Args:
            heights: Height of each training person's box, in pixels of its image, shape (n,).
            owners: Its client, shape (n,).
        """
        names = self.own_client_names() or []
        if unknown := [name for name in self._input_sizes if name not in names]:
            raise ConfigError(
                f"data.input_sizes names client {unknown[0]!r}, which does not exist; the clients are "
                f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
            )
        for client in np.unique(owners[owners >= 0]).tolist():
            if (size := self._input_sizes.get(names[client])) is None:
                usual = float(np.median(heights[owners == client]))
                size = next((size for size in self.resolutions if size[0] <= usual), self.resolutions[-1])
            self._levels[client] = self.resolutions.index((size[0], size[1]))

    def _measured(self, train: People, test: People) -> Parts:
        """The checked persons, of whom partitions count the number; their boxes are known from now on."""
        train, test = (people.checked(self.num_joints) for people in (train, test))
        needed = self.max_train_samples
        if self.samples_per_client is not None and needed is not None and needed > len(train):
            raise ConfigError(
                f"data.samples_per_client {self.samples_per_client} for {self.num_clients} clients takes {needed} "
                f"persons, and {train.source} has {len(train)}; lower it, or data.num_clients"
            )
        self._learn_boxes(np.concatenate([train.extent, test.extent]))
        return Parts(Part(train), Part(test), source=train.source)

    @override
    def pooled(self) -> str | None:
        if self.antialias:
            return "data.antialias shrinks pictures by the heights of all clients' boxes; set it to false"
        return None

    def _learn_boxes(self, heights: NDArray[np.float32]) -> None:
        """Take the least and the median height of a box from all boxes (n,)."""
        self.box_heights = (float(heights.min()), float(np.median(heights)))
        self._made.clear()

    # Predictions.

    @override
    def records(self, columns: Mapping[str, NDArray[Any]], new: NewInputs | None) -> Records | None:
        """Joints by name, in pixels of the original images; None for a task that predicts something else."""
        points, scores, numbers = (columns.get(name) for name in ("keypoints", "score", "image_id"))
        if points is None or scores is None or numbers is None or points.shape[1:] != self.output_shape:
            return None
        if new is not None and new.files is not None:
            files = new.files
            images = [(int(number), Path(file).name) for number, file in zip(numbers, files, strict=True)]
            readers: list[Callable[[], NDArray[np.uint8]]] = [partial(read_photograph, Path(file)) for file in files]
        else:
            photographs = [self.image_of(int(number)) for number in numbers]
            numbered = len({number for number, _, _ in photographs}) == len(set(numbers.tolist()))
            images = [
                (number if numbered else int(unique), name)
                for unique, (number, name, _) in zip(numbers, photographs, strict=True)
            ]
            readers = [reader for _, _, reader in photographs]
        rows, results = found_records(points, scores, images, self.joint_names, self.skeleton.category)

        def picture() -> Figure:
            shown = list(by_image(images).values())[:_MOST_PHOTOGRAPHS]
            posed = [Posed(images[places[0]][1], readers[places[0]](), points[places]) for places in shown]
            return skeletons_picture(posed, self.skeleton)

        return Records(rows, results, picture)

    # A run's record.

    @override
    def describe(self, client_id: int) -> dict[str, Any]:
        """With the client's own ``resolution``, [height, width]."""
        return super().describe(client_id) | {"resolution": list(self.resolutions[self.level(client_id)])}

    @override
    def figure(self) -> Figure | None:
        """Samples of each client, coloured by resolution."""
        ids = np.asarray(list(self.census.clients), dtype=np.int64)
        if not len(ids):
            return None
        ids = ids[even_subset(len(ids), MOST_CLIENTS)]
        return levels_picture(
            self._ready.train.sizes[ids],
            np.asarray([self.level(client_id) for client_id in ids.tolist()]),
            [named_size(size) for size in self.resolutions],
            ids,
        )


def named_size(size: Size) -> str:
    """A resolution as a word: ``256x192``."""
    return f"{size[0]}x{size[1]}"


def levels_picture(sizes: IntArray, levels: IntArray, names: Sequence[str], client_ids: IntArray) -> Figure:
    """Samples (n,) of each client, coloured by its level (n,); `names` are the levels'."""
    from matplotlib import colormaps

    figure, axes = new_figure()
    colours = colormaps["viridis"](np.linspace(0.15, 0.85, len(names)))
    for level, name in enumerate(names):
        here = np.flatnonzero(levels == level)
        if len(here):
            axes.bar(here, sizes[here], width=0.9, color=colours[level], label=name)
    label_axis(axes.xaxis, client_ids, "client")
    axes.set_ylabel("training samples")
    axes.set_ylim(0, 1.25 * max(1, int(sizes.max())))
    axes.legend(title="resolution", ncols=len(names), loc="upper right")
    axes.set_title("Who has how much, and sees it how well")
    return figure


def _check_levels(sizes: Sequence[Size]) -> None:
    if not sizes:
        raise ConfigError("data.resolutions is empty; give at least one [height, width]")
    for higher, lower in pairwise(sizes):
        if not (lower[0] < higher[0] and lower[1] < higher[1]):
            raise ConfigError(
                f"data.resolutions has {list(lower)} after {list(higher)}; give the highest first, each smaller than "
                "the one before"
            )


def _refuse_simulated(counts: list[int] | None, samples: int | None) -> None:
    """Refuse settings that simulate clients, beside clients of the data set's own."""
    if counts is not None:
        raise ConfigError(
            "data.clients_per_level is for simulated clients, and data.partition is Natural; leave the counts out, and "
            "set data.input_sizes by the clients' names"
        )
    if samples is not None:
        raise ConfigError(
            "data.samples_per_client is for simulated clients, and data.partition is Natural; leave the number out"
        )


def _clients_per_level(counts: list[int] | None, num_clients: int | None, num_levels: int) -> list[int]:
    """Number of clients of each level."""
    if counts is None:
        total = num_levels if num_clients is None else num_clients
        check_range("data.num_clients", total, least=1)
        return [total // num_levels + (level < total % num_levels) for level in range(num_levels)]
    if len(counts) != num_levels or min(counts) < 0 or sum(counts) < 1:
        raise ConfigError(
            f"data.clients_per_level is {counts}; it must be one number for each of the {num_levels} resolutions, 0 or "
            "more, with a sum of at least 1"
        )
    if num_clients is not None and num_clients != sum(counts):
        raise ConfigError(
            f"data.num_clients is {num_clients}, and data.clients_per_level has {sum(counts)}; leave out one of them"
        )
    return list(counts)
