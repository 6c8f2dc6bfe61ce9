"""UWA and sUWA.

Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026, arXiv:2509.15147,
Section 4.4, Algorithm 1 and Appendix A.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning import Fabric
from torch import Tensor

from lit_fed.callbacks.pictures import even_subset, weights_picture
from lit_fed.client import ClientContext, ClientModule
from lit_fed.densities import ClassGaussians, fit_class_gaussians, log_density
from lit_fed.errors import ConfigError
from lit_fed.methods.federated_distillation import MOST_WATCHED, DistillationServer, FederatedDistillation
from lit_fed.mixing import Mixed
from lit_fed.engine.payload import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from lit_fed.data import FederatedDataModule


class UWA(FederatedDistillation):
    """A client that also says what its logits look like on its own classes.

    After private training it fits one diagonal Gaussian per class to its logits (`lit_fed.densities`) and sends their
    means and variances (K, C) beside its logits.

    Args:
        density_data: Fit to the ``calibration`` split (``data.calibration_fraction``), which is never trained on, or to
            the private training data as augmented for training (``augmented``).
        kwargs: Passed on to `lit_fed.methods.federated_distillation.FederatedDistillation`.

    Raises:
        ConfigError: For other data.

    Note:
        Section 4.4 has the held-out split, the caption of Table 2 the augmented private data. A class with fewer than
        two calibration samples is left out; a client left without any class sends an empty density and has no say
        where anybody else has one.
    """

    def __init__(self, density_data: Literal["calibration", "augmented"] = "calibration", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if density_data not in ("calibration", "augmented"):
            raise ConfigError(f"model.density_data is {density_data!r}; it must be 'calibration' or 'augmented'")
        self.density_data = density_data

    def check_population(self, data: FederatedDataModule) -> None:
        """Refuse data without what the method needs.

        Raises:
            ConfigError: As for any distillation, or without calibration samples where they are wanted.
        """
        super().check_population(data)
        if self.density_data == "calibration" and not data.has_calibration:
            raise ConfigError(
                "model UWA fits densities to calibration samples; set data.init_args.calibration_fraction above 0 "
                "(the paper: 0.2), or model.density_data to augmented"
            )

    def answer(self, ctx: ClientContext) -> dict[str, Tensor]:
        """Logits, and the density's means and variances."""
        held_out = self.density_data == "calibration"
        loader = ctx.data.calibration_loader(ctx.client_id) if held_out else ctx.train_loader()
        density = fit_class_gaussians(*self.infer(loader))
        return super().answer(ctx) | {"mean": density.mean.float(), "variance": density.variance.float()}

    def example_payload(self, ctx: ClientContext) -> Payload:
        """Logits, and the densities of a client that has every class, which is the most there can be; all empty."""
        density = torch.empty(self.num_classes, self.num_classes, device="meta")
        return {**super().example_payload(ctx), "mean": density, "variance": density}


class UWAServer(DistillationServer):
    r"""Trusts a client where an input looks to it like its own: :math:`w_i(x) = \mathrm{softmax}_i(\tau\,\ell_i(x))`.

    :math:`\ell_i(x)` is the log density of client i's logits under its own Gaussians. Draws the mean weight of every
    client on the public samples of each class, as the mixture sees them.

    Args:
        temperature: τ: 1 is UWA, 0.25 the paper's sUWA, 0 the average, ``inf`` the most confident client's word.
        aggregate: Mix ``probabilities``, as in the paper, or ``logits``.

    Raises:
        ConfigError: For a negative temperature, or clients without densities.
    """

    def __init__(
        self, temperature: float = 1.0, aggregate: Literal["probabilities", "logits"] = "probabilities"
    ) -> None:
        super().__init__(aggregate)
        if not temperature >= 0:
            raise ConfigError(f"algorithm.temperature is {temperature}; it must not be negative")
        self.temperature = temperature
        self.picture: NDArray[np.float64] | None = None

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Start without a mixture.

        Raises:
            ConfigError: If the clients send no densities.
        """
        super().setup(module, data, fabric)
        if not isinstance(module, UWA):
            raise ConfigError(f"algorithm UWAServer needs a model UWA; this one is {type(module).__name__}")
        self._watched = even_subset(data.num_clients, MOST_WATCHED)

    def watched(self) -> Sequence[int]:
        """At most 64 clients, evenly spread."""
        return [int(client_id) for client_id in self._watched]

    def read(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """What a client's answer contributes (P, C), and its log densities (P,)."""
        density = ClassGaussians(payload["mean"], payload["variance"])
        return super().read(payload)[0], log_density(payload["logits"], density)

    def step(self, aggregate: Mixed, round_idx: int, num_clients: int) -> dict[str, float]:
        """Take the mixture for the next broadcast."""
        metrics = super().step(aggregate, round_idx, num_clients)
        assert self.targets is not None
        self.picture = self._mean_weights(aggregate.weights, self.targets.argmax(1))
        return metrics

    def figures(self) -> dict[str, Figure]:
        """The client × class picture of the last round's mean weights."""
        return {} if self.picture is None else {"weights": weights_picture(self.picture, self._watched)}

    def _mean_weights(self, weights: dict[int, Tensor], classes: Tensor) -> NDArray[np.float64]:
        """Shape (clients watched, C); NaN for clients that did not take part and classes the mixture never sees."""
        picture = np.full((len(self._watched), self.num_classes), np.nan)
        counts = torch.bincount(classes, minlength=self.num_classes).double()
        rows = {client_id: row for row, client_id in enumerate(self._watched.tolist())}
        for client_id, weight in weights.items():
            sums = torch.zeros_like(counts).index_add_(0, classes, weight)
            picture[rows[client_id]] = (sums / counts).cpu().numpy()  # 0/0 is NaN
        return picture
