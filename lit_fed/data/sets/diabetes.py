"""A small regression data set within scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.population.in_memory import Arrays, TensorDataModule
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
            x[~test].astype(np.float32),
            y[~test],
            x[test].astype(np.float32),
            y[test],
            source="scikit-learn's diabetes",
            strata_train=strata_train,
            strata_test=strata_test,
        )
