"""Small data sets within scikit-learn: no download, no files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.cut import Part
from lit_fed.data.population.in_memory import Arrays, ImageDataModule, TensorDataModule
from lit_fed.data.population.targets import quantile_strata
from lit_fed.seeding import numpy_generator


class Diabetes(TensorDataModule):
    """Progression of diabetes within a year, of 442 patients, from 10 measurements: a regression without files.

    A fixed fifth of the patients, 88, is the test set. Measurements and target are standardised by the mean and
    standard deviation of the other 354, so that the constant prediction 0 has a mean squared error of 1 on these.

    Efron et al., "Least Angle Regression", The Annals of Statistics 32(2), 2004; the copy within scikit-learn.

    Args:
        strata: Number of strata of equal size by target; partitions such as `Dirichlet` cut by them as by classes.
        kwargs: The population's settings, see `FederatedDataModule`.

    Raises:
        ConfigError: The number of strata is out of range.
    """

    input_shape = (10,)

    def __init__(self, strata: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("data.strata", strata, least=1)
        self.num_strata = strata

    @override
    def load_arrays(self) -> Arrays:
        from sklearn.datasets import load_diabetes  # imported here, because it takes a second

        bunch = load_diabetes(scaled=False)
        test = np.zeros(len(bunch.target), dtype=bool)
        test[numpy_generator(0, "diabetes", "test").permutation(len(test))[: len(test) // 5]] = True
        x, y = (
            (values - values[~test].mean(axis=0)) / values[~test].std(axis=0) for values in (bunch.data, bunch.target)
        )
        strata_train, strata_test = quantile_strata(y[~test], y[test], self.num_strata)
        return Arrays(
            x[~test].astype(self.float_dtype),
            y[~test],
            x[test].astype(self.float_dtype),
            y[test],
            source="scikit-learn's diabetes",
            strata_train=strata_train,
            strata_test=strata_test,
        )


class Digits(ImageDataModule):
    """1,797 handwritten digits of 8×8 pixels in 10 classes, split 80/20 within each class.

    The split is independent of the settings. Pixels of 0 … 16 are scaled to [0, 1] and normalised.

    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998; the copy
    within scikit-learn, which is the test part of the original.

    Args:
        crop_padding: Zeros padded on every side before a random crop of training images; 0 for no crop.
        horizontal_flip: Mirror training images at random.
        image_size: Pixels per side to scale images to; null keeps their size.
        normalize: File of ``lit-fed statistics``, whose figures take the place of the constants.
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    num_classes = 10
    class_names = [str(digit) for digit in range(10)]  # noqa: RUF012  # a property of the base, as num_classes is
    stored_shape = (1, 8, 8)

    def __init__(
        self,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        image_size: int | None = None,
        normalize: str | None = None,
        **kwargs: Any,
    ) -> None:
        # Mean 4.884/16 and standard deviation 6.017/16 of all pixels.
        super().__init__(
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            image_size=image_size,
            mean=[0.3053] if normalize is None else None,
            std=[0.3760] if normalize is None else None,
            max_value=16.0,
            normalize=normalize,
            **kwargs,
        )

    @override
    def load_arrays(self) -> Arrays:
        from sklearn.datasets import load_digits  # imported here, because it takes a second

        bunch = load_digits()
        x, y = bunch.images[:, None].astype(np.uint8), bunch.target.astype(np.int64)
        test = np.zeros(len(y), dtype=bool)
        for label in range(self.num_classes):
            members = np.flatnonzero(y == label)
            shuffled = numpy_generator(0, "digits", "test", label).permutation(members)
            test[shuffled[: round(0.2 * len(members))]] = True
        return Arrays(x[~test], y[~test], x[test], y[test], source="scikit-learn's digits")


class DigitPairs(Digits):
    """The numbers 00 to 99: two of `Digits` side by side, 8×16 pixels in 100 classes of 100 images, 20 more for tests.

    A task of many classes that needs no files and is learnt quickly. Left and right are drawn with replacement from
    the digits' training images, or test images for tests; the pairs are independent of the settings.
    """

    num_classes = 100
    class_names = [f"{number:02}" for number in range(100)]  # noqa: RUF012  # a property of the base
    stored_shape = (1, 8, 16)

    @override
    def load_arrays(self) -> Arrays:
        digits = super().load_arrays()
        train = _pairs(digits.train, 100, "train")
        test = _pairs(digits.test, 20, "test")
        return Arrays(*train, *test, source=digits.source)


def _pairs(digits: Part, each: int, part: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """`each` images of every number, in the order 00, 01, …, 99, 00, …, and their numbers."""
    generator = numpy_generator(0, "digits", "pairs", part)
    of_digit = [np.flatnonzero(digits.y == digit) for digit in range(10)]
    numbers = np.tile(np.arange(100), each)
    left, right = (
        np.array([generator.choice(of_digit[digit]) for digit in place]) for place in (numbers // 10, numbers % 10)
    )
    return np.concatenate([digits.x[left], digits.x[right]], axis=-1), numbers
