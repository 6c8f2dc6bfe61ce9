"""Bring your own data as arrays: three members, and every partition, loader and picture works.

For a regression leave ``num_classes`` out and give floating-point targets; `lit_fed.data.Diabetes` is one.

Run it with ``lit-fed fit -c configs/quickstart.yaml -c examples/my_data.yaml``.
"""

import numpy as np

from lit_fed.data import Arrays, TensorDataModule


class Blobs(TensorDataModule):
    """Gaussian clouds, one a class, in 16 dimensions: 1,000 samples to train on and 200 to test on."""

    num_classes = 4
    input_shape = (16,)

    def load_arrays(self) -> Arrays:
        """Read, or here make, the samples; called once in every process, so it must give each the same."""
        rng = np.random.default_rng(0)
        centres = rng.normal(size=(self.num_classes, 16))
        y = rng.integers(self.num_classes, size=1200)
        x = (centres[y] + rng.normal(size=(1200, 16))).astype(np.float32)
        return Arrays(x[:1000], y[:1000], x[1000:], y[1000:], source="blobs")
