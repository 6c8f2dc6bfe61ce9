"""Public image sets in the files that torchvision reads: Fashion-MNIST, CIFAR-10, CIFAR-100."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torchvision import datasets
from typing_extensions import override

from lit_fed.data.population.in_memory import Arrays, ImageDataModule, channels_first
from lit_fed.errors import ConfigError


class _TorchvisionModule(ImageDataModule):
    """A data set that torchvision reads and fetches.

    Args:
        mean: Per channel, of pixels scaled to [0, 1]; null for `usual_mean`.
        std: Per channel; null for `usual_std`.
        normalize: File of ``lit-fed statistics``, whose figures take the place of `mean` and `std`.
        kwargs: The images' settings, see `ImageDataModule`, and the population's, see `FederatedDataModule`.
    """

    reader: ClassVar[type[Any]]
    folder: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    usual_mean: ClassVar[list[float]]
    usual_std: ClassVar[list[float]]
    class_names: list[str] | None = None

    def __init__(
        self,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        normalize: str | None = None,
        **kwargs: Any,
    ) -> None:
        if mean is None and std is None and normalize is None:
            mean, std = self.usual_mean, self.usual_std
        super().__init__(mean=mean, std=std, normalize=normalize, **kwargs)

    @override
    def prepare_data(self) -> None:
        """Fetch missing files if `download` is set."""
        if not self.download:
            return
        for train in (True, False):
            try:
                self.reader(self.root, train=train, download=True)
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"the download failed ({_first_line(error)}); {self._advice()}") from error

    @override
    def load_arrays(self) -> Arrays:
        arrays: list[Any] = []
        for train in (True, False):
            try:
                split = self.reader(self.root, train=train, download=False)
            except (OSError, RuntimeError, ValueError, AssertionError) as error:
                raise ConfigError(f"files are missing or damaged ({_first_line(error)}); {self._advice()}") from error
            self.class_names = [str(name) for name in split.classes]
            arrays += [channels_first(np.asarray(split.data)), np.asarray(split.targets, dtype=np.int64)]
        x_train, y_train, x_test, y_test = arrays
        return Arrays(x_train, y_train, x_test, y_test, source=str(Path(self.root) / self.folder))

    def _advice(self) -> str:
        return (
            f"{type(self).__name__} reads {', '.join(self.files)} in {Path(self.root) / self.folder}; put them there, "
            "set data.root to their folder, or set data.download to true to fetch them"
        )


class FashionMNIST(_TorchvisionModule):
    """Fashion-MNIST: 60,000 training and 10,000 test pictures of clothing, 28×28 grey, 10 classes.

    Pixels are normalised by the mean and standard deviation of the training images. Files as torchvision keeps them:
    ``<root>/FashionMNIST/raw/train-images-idx3-ubyte`` and so on.

    Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017,
    arXiv:1708.07747.
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
    usual_mean, usual_std = [0.2860], [0.3530]


class CIFAR10(_TorchvisionModule):
    """CIFAR-10: 50,000 training and 10,000 test photographs, 32×32 RGB, 10 classes.

    Training images are padded by 4, cropped and mirrored at random; all are normalised with the mean and standard
    deviation of ImageNet, as in the public code of FedDr+. Files as torchvision keeps them:
    ``<root>/cifar-10-batches-py/data_batch_1`` and so on; torchvision checks them against published checksums before
    it opens them.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, 2009.

    Args:
        crop_padding: Zeros padded on every side before a random crop of training images; 0 for no crop.
        horizontal_flip: Mirror training images at random.
        kwargs: The other settings, see `ImageDataModule` and `FederatedDataModule`.
    """

    reader = datasets.CIFAR10
    num_classes = 10
    stored_shape = (3, 32, 32)
    folder = "cifar-10-batches-py"
    files = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
    usual_mean, usual_std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

    def __init__(self, crop_padding: int = 4, horizontal_flip: bool = True, **kwargs: Any) -> None:
        super().__init__(crop_padding=crop_padding, horizontal_flip=horizontal_flip, **kwargs)


class CIFAR100(_TorchvisionModule):
    """CIFAR-100: 50,000 training and 10,000 test photographs, 32×32 RGB, 100 classes.

    Training images are padded by 4, cropped and mirrored at random; all are normalised as in the public code of
    FedDr+. Files as torchvision keeps them: ``<root>/cifar-100-python/train``, ``test`` and ``meta``; torchvision
    checks them against published checksums before it opens them.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, 2009.

    Args:
        crop_padding: Zeros padded on every side before a random crop of training images; 0 for no crop.
        horizontal_flip: Mirror training images at random.
        kwargs: The other settings, see `ImageDataModule` and `FederatedDataModule`.
    """

    reader = datasets.CIFAR100
    num_classes = 100
    stored_shape = (3, 32, 32)
    folder = "cifar-100-python"
    files = ("train", "test", "meta")
    usual_mean, usual_std = [0.507, 0.487, 0.441], [0.267, 0.256, 0.276]

    def __init__(self, crop_padding: int = 4, horizontal_flip: bool = True, **kwargs: Any) -> None:
        super().__init__(crop_padding=crop_padding, horizontal_flip=horizontal_flip, **kwargs)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
