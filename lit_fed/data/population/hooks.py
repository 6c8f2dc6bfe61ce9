"""The hooks by which a data set tells its population of its shapes, names, samples, loaders and views."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.loaders.transforms import Step
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Parts
from lit_fed.data.population.census import Scale
from lit_fed.data.population.figures import Figures
from lit_fed.data.population.files import NewInputs, Records
from lit_fed.data.population.views import View
from lit_fed.errors import ConfigError

Subset = Literal["train", "test"]
SUBSETS: tuple[Subset, Subset] = ("train", "test")


@dataclass(frozen=True)
class Batches:
    """The samples that a loader is asked for, and how it batches them.

    Args:
        subset: The part of the data set that the indices count in.
        indices: The samples, shape (n,).
        batch_size: Samples per batch.
        generator: Shuffles the samples; None keeps their order.
        training: Whether to augment the samples and to obey `drop_last`.
    """

    subset: Subset
    indices: IntArray
    batch_size: int
    generator: torch.Generator | None = None
    training: bool = False


class DataHooks(ABC):
    """A data set, as its population sees it; `FederatedDataModule` calls the hooks."""

    _figures: Figures | None = None
    """A federation's means and standard deviations, in use."""
    given_to_model: str | None = None
    """As `pooled`, of figures that the model's settings have asked for."""
    keeps_missing = False
    """Whether missing numbers stay NaN, and others keep 64 bits; statistics set it, before anything is read."""
    fills_missing = False
    """Whether the preprocessing replaces missing numbers, which are stored as NaN."""

    # The data set; known without `setup`.

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as the model sees it, such as (channels, height, width)."""

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all inputs that a model may see, in training and in evaluations."""
        return (self.input_shape,)

    @property
    def in_channels(self) -> int:
        """Channels of an input: the first entry of `input_shape`."""
        return self.input_shape[0]

    @property
    def image_size(self) -> int | None:
        """Height of an image in pixels; None for other inputs."""
        return self.input_shape[-2] if len(self.input_shape) == 3 else None

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None for a regression."""
        return None

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a model's output for one sample: (num_classes,), or () or (k,) in a regression.

        Override it for k targets per sample.
        """
        return () if self.num_classes is None else (self.num_classes,)

    @property
    def target_scale(self) -> list[tuple[float, float]] | None:
        """Mean and standard deviation of each numerical target: the federation's, see `Figures`; None if not known."""
        return None if self._figures is None else self._figures.of_targets(getattr(self, "target_names", None))

    def own_clients(self) -> int | None:
        """Number of clients that the data set itself names, by default of `own_client_names`; None if it names none."""
        names = self.own_client_names()
        return None if names is None else len(names)

    def own_client_names(self) -> list[str] | None:
        """Names of the data set's own clients, in their order; None if they have no names."""
        return None

    def own_clients_are(self) -> tuple[str, str]:
        """For errors: the source of the data set's own clients, and how to ignore it."""
        return "client_train of the data", "leave client_train out"

    # The data set; known after `setup`.

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, in their order; None if they have no names."""
        return None

    @property
    def float_dtype(self) -> type[np.float32 | np.float64]:
        """Type of published numbers that need no more than 32 bits in training."""
        return np.float64 if self.keeps_missing else np.float32

    def preprocessing(self) -> list[Step] | None:
        """Steps from stored inputs to the model's inputs, for checkpoints; None for custom code."""
        return None

    def stored_like(self) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype of an input of `load_network`'s networks, such as ``((1, 28, 28), "uint8")``.

        None if no sample is here to tell.
        """
        return None

    def target_values(self, indices: IntArray) -> NDArray[Any] | None:
        """Numerical targets (n,) or (n, k) of training samples, to describe and draw them.

        None for classes, and if only reading every sample would give the targets.
        """
        del indices
        return None

    def pooled(self) -> str | None:
        """Anything computed over several clients' data before training, and the remedy; None for nothing.

        A mean or a class name that depends on one client reaches all others past `trainer.privacy`, which refuses the
        data with this line. Settings and constants of a published data set are not meant.
        """
        return None if self._figures is None else self._figures.exact()

    def read_contents(self) -> Iterator[NDArray[Any]]:
        """Arrays with a sample per row that identify these data; by default none.

        Yield the same for the same data on every machine: raw values rather than transformed ones. Floating-point
        numbers are compared up to rounding.
        """
        yield from ()

    def input_scale(self, client_id: int) -> Scale | None:
        """Scale of a client's inputs if every node stores its own data; None if a setting or a common file fixes it."""
        del client_id
        return None

    def agree(self, scales: Mapping[str, Scale | None]) -> None:
        """Take the common scale of the inputs here and of those that remote clients report, by their names."""
        del scales

    # Reading.

    @abstractmethod
    def read_parts(self) -> Parts:
        """Read the samples, or what partitions need of them; called once by `setup`."""

    @abstractmethod
    def make_loader(self, batches: Batches) -> Loader:
        """A loader over some samples."""

    def make_stored_loader(self, batches: Batches) -> Loader:
        """A loader over samples as stored, neither normalised nor augmented, for statistics."""
        del batches
        raise ConfigError(f"{type(self).__name__} gives no stored values, of which statistics could be taken")

    def image_sizes(self, indices: IntArray) -> Iterator[NDArray[np.int64]]:
        """Heights and widths (n, 2) of training samples whose files have a size each, in batches; by default none."""
        del indices
        yield from ()

    @abstractmethod
    def make_public_loader(self, batches: Batches) -> Loader:
        """A loader over training samples that yields positions in the indices (int64) in place of labels."""

    def new_inputs(self, path: Path) -> NewInputs:
        """Samples of a file or a folder, to predict on; called after `setup`.

        Raises:
            ConfigError: The file is missing or damaged, or its samples do not fit the network.
        """
        raise ConfigError(f"{type(self).__name__} reads no inputs from files; predict on {path} in Python")

    def records(self, columns: Mapping[str, NDArray[Any]], new: NewInputs | None) -> Records | None:
        """Predictions as records, for ``.json`` and ``.csv`` files; None writes a row of numbers per sample.

        Args:
            columns: Outputs of ``predict_step`` by name, (n, …).
            new: The inputs; None for test data.
        """
        del columns, new
        return None

    def keep(self, train: IntArray, test: IntArray) -> None:
        """Free all training samples but some (n,), ascending, and all test samples but the shared test set.

        Called by a `setup` of some clients only.
        """
        del train, test

    def move_to(self, device: torch.device) -> None:
        """Move data in memory to a device; called once after `setup`."""
        del device

    # Views.

    def view(self, client_id: int) -> View | None:
        """The view of a client's batches, such as a lower resolution; None shows them unchanged.

        A view is applied to all batches of the client's own data, after normalising. See `ViewLoader` for random ones.
        """
        del client_id
        return None

    def shared_view(self) -> View | None:
        """The view of shared and pooled sets; None shows them unchanged."""
        return None

    def views(self) -> Mapping[str, View]:
        """The views that an evaluation may ask for, by name, in the order of evaluation."""
        return {}

    def pictured(self) -> Mapping[str, Sequence[str]]:
        """The `views` that a run draws beside each other at its end, by the picture's name."""
        return {}
