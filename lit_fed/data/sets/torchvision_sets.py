"""Public image sets in the files that torchvision reads: Fashion-MNIST, CIFAR-10, CIFAR-100."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torchvision import datasets

from lit_fed.data.population.in_memory import Arrays, ImageDataModule, channels_first
from lit_fed.errors import ConfigError


class _TorchvisionModule(ImageDataModule):
    """A data set that torchvision can read and fetch."""

    reader: ClassVar[type[Any]]
    folder: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    _class_names: list[str] | None = None

    def prepare_data(self) -> None:
        """Fetch the files where `download` is set and they are missing.

        Raises:
            ConfigError: They cannot be fetched.
        """
        if not self.download:
            return
        for train in (True, False):
            try:
                self.reader(self.root, train=train, download=True)
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"the download failed ({_first_line(error)}); {self._advice()}") from error

    def load_arrays(self) -> Arrays:
        """See `TensorDataModule.load_arrays`."""
        arrays: list[Any] = []
        for train in (True, False):
            try:
                split = self.reader(self.root, train=train, download=False)
            except (OSError, RuntimeError, ValueError, AssertionError) as error:
                raise ConfigError(f"files are missing or damaged ({_first_line(error)}); {self._advice()}") from error
            self._class_names = [str(name) for name in split.classes]
            arrays += [channels_first(np.asarray(split.data)), np.asarray(split.targets, dtype=np.int64)]
        x_train, y_train, x_test, y_test = arrays
        return Arrays(x_train, y_train, x_test, y_test, source=str(Path(self.root) / self.folder))

    @property
    def class_names(self) -> list[str] | None:
        """What the data set calls its classes."""
        return self._class_names

    def _advice(self) -> str:
        return (
            f"{type(self).__name__} reads {', '.join(self.files)} in {Path(self.root) / self.folder}: put them there, "
            "set data.root to where they are, or set data.download to true where there is a network"
        )


class FashionMNIST(_TorchvisionModule):
    """Fashion-MNIST: 60,000 training and 10,000 test pictures of clothing, 28×28 grey, 10 classes.

    Files as torchvision keeps them: ``<root>/FashionMNIST/raw/train-images-idx3-ubyte`` and so on.

    Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017,
    arXiv:1708.07747.

    Args:
        crop_padding: Train on random crops after padding with so many zeros on every side; 0 for none.
        horizontal_flip: Train on randomly mirrored images.
        image_size: Scale images to this many pixels a side; none given keeps 28.
        mean: Of pixels scaled to [0, 1]; none given means that of the training images.
        std: Of the same.
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    reader = datasets.FashionMNIST
    num_classes = 10
    stored_shape = (1, 28, 28)
    folder = "FashionMNIST/raw"
    files = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )

    def __init__(
        self,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        image_size: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if mean is None and std is None:
            mean, std = [0.2860], [0.3530]
        super().__init__(
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            image_size=image_size,
            mean=mean,
            std=std,
            **kwargs,
        )


class CIFAR10(_TorchvisionModule):
    """CIFAR-10: 50,000 training and 10,000 test photographs, 32×32 RGB, 10 classes.

    Training images are cropped at random after padding by 4 and mirrored at random; all are normalised with the mean
    and standard deviation of ImageNet, as in the public code of FedDr+. Files as torchvision keeps them:
    ``<root>/cifar-10-batches-py/data_batch_1`` and so on; torchvision checks them against published checksums before
    it opens them.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, 2009.

    Args:
        crop_padding: Train on random crops after padding with so many zeros on every side; 0 for none.
        horizontal_flip: Train on randomly mirrored images.
        image_size: Scale images to this many pixels a side; none given keeps 32.
        mean: Per channel, of pixels scaled to [0, 1]; none given means ImageNet's.
        std: Per channel; none given means ImageNet's.
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    reader = datasets.CIFAR10
    num_classes = 10
    stored_shape = (3, 32, 32)
    folder = "cifar-10-batches-py"
    files = (
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
        "batches.meta",
    )

    def __init__(
        self,
        crop_padding: int = 4,
        horizontal_flip: bool = True,
        image_size: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if mean is None and std is None:
            mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        super().__init__(
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            image_size=image_size,
            mean=mean,
            std=std,
            **kwargs,
        )


class CIFAR100(_TorchvisionModule):
    """CIFAR-100: 50,000 training and 10,000 test photographs, 32×32 RGB, 100 classes.

    Training images are cropped at random after padding by 4 and mirrored at random; all are normalised as in the
    public code of FedDr+. Files as torchvision keeps them: ``<root>/cifar-100-python/train``, ``test`` and ``meta``;
    torchvision checks them against published checksums before it opens them.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, 2009.

    Args:
        crop_padding: Train on random crops after padding with so many zeros on every side; 0 for none.
        horizontal_flip: Train on randomly mirrored images.
        image_size: Scale images to this many pixels a side; none given keeps 32.
        mean: Per channel, of pixels scaled to [0, 1]; none given means that of FedDr+'s code.
        std: Per channel; none given means that of FedDr+'s code.
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    reader = datasets.CIFAR100
    num_classes = 100
    stored_shape = (3, 32, 32)
    folder = "cifar-100-python"
    files = ("train", "test", "meta")

    def __init__(
        self,
        crop_padding: int = 4,
        horizontal_flip: bool = True,
        image_size: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if mean is None and std is None:
            mean, std = [0.507, 0.487, 0.441], [0.267, 0.256, 0.276]
        super().__init__(
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            image_size=image_size,
            mean=mean,
            std=std,
            **kwargs,
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
