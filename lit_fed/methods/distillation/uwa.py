"""UWA and sUWA.

Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026, arXiv:2509.15147,
Section 4.4, Algorithm 1 and Appendix A.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.callbacks.pictures import weights_picture
from lit_fed.checks import check_range
from lit_fed.data.population.pictures import even_subset
from lit_fed.errors import ConfigError
from lit_fed.methods.distillation.densities import ClassGaussians, fit_class_gaussians, log_density
from lit_fed.methods.distillation.exchange import logits_of
from lit_fed.methods.distillation.federated_distillation import FederatedDistillation
from lit_fed.methods.distillation.mixing import Mixed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_WATCHED = 64  # clients whose weights are pictured
CALIBRATION = "calibration"  # the pass over the samples that densities are fitted to


class UWA(FederatedDistillation):
    r"""Trusts a client on inputs that resemble its own data: :math:`w_i(x) = \mathrm{softmax}_i(\tau\,\ell_i(x))`.

    After private training a client fits one diagonal Gaussian per class to its logits
    (`lit_fed.methods.distillation.densities`) and sends their means and variances (K, C) beside its logits.
    :math:`\ell_i(x)` is the log density of client i's logits under its own Gaussians. Draws every client's mean weight
    on the public samples of each class, by the mixture's classes.

    Args:
        temperature: τ: 1 is UWA, 0.25 the paper's sUWA, 0 the average, ``inf`` the most confident client alone.
        density_data: Fit to the ``calibration`` samples, which are never trained on, or to the private training data as
            augmented for training (``augmented``).
        calibration_fraction: Share of every client's samples that is held out for the densities; the paper's by
            default.
        kwargs: The settings of `lit_fed.methods.distillation.federated_distillation.FederatedDistillation`.

    Raises:
        ConfigError: For a negative temperature, another `density_data`, or a `calibration_fraction` of 0 that is
            needed.

    Note:
        Section 4.4 has the held-out split, the caption of Table 2 the augmented private data. A class with fewer than
        two calibration samples is left out; a client without any class sends an empty density and gets no weight where
        another client has a density.
    """

    needs = frozenset({"loss", "forward", "public", "classes", "targets", "one_model"})
    varying = frozenset({"mean", "variance"})
    nonnegative = frozenset({"variance"})

    def __init__(
        self,
        temperature: float = 1.0,
        density_data: Literal["calibration", "augmented"] = "calibration",
        calibration_fraction: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(calibration_fraction=calibration_fraction, **kwargs)
        self.temperature = check_range("algorithm.temperature", temperature, least=0, infinite=True)
        self.density_data = density_data
        if density_data == "calibration" and not calibration_fraction:
            raise ConfigError(
                "algorithm UWA fits densities to calibration samples; set algorithm.calibration_fraction above 0 "
                "(the paper: 0.2), or algorithm.density_data to augmented"
            )

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start without a mixture; the mean weights (watched clients, C) are −1 where unknown."""
        server = super().setup(models, population)
        self._watched = even_subset(population.num_clients, MOST_WATCHED)
        return {**server, "weights": torch.full((len(self._watched), self.num_classes), -1.0)}

    # ------------------------------------------------------------------ client

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """The work, then a pass over the samples that the densities are fitted to."""
        return [*super().phases(client), *([self.calibration_pass(client)] if client.stage == "train" else [])]

    def calibration_pass(self, client: fed.Client) -> fed.Pass:
        """Read logits (n, C) and labels (n,); the example has 2 samples per class, the least for a density."""
        held_out = self.density_data == "calibration"
        loader = client.population.calibration_loader(client.id) if held_out else client.train_loader()
        labels = torch.arange(self.num_classes, device="cpu").repeat(2)
        example = {"logits": torch.zeros(len(labels), self.num_classes, device="cpu"), "labels": labels}
        return fed.Pass(CALIBRATION, loader, _labelled_logits, example=example)

    def finish(self, client: fed.Client) -> fed.Update:
        """Logits on the public set, and the density's means and variances."""
        density = fit_class_gaussians(**client.results[CALIBRATION])
        update = super().finish(client)
        update.payload = {**update.payload, "mean": density.mean.float(), "variance": density.variance.float()}
        return update

    # ------------------------------------------------------------------ server

    def reducer(self, server: fed.Server) -> fed.Reducer[Mixed]:
        """A mixture by `temperature`, which watches at most 64 clients, evenly spread."""
        return self.mixture(self._watched.tolist())

    def read(self, payload: fed.Payload) -> tuple[Tensor, Tensor]:
        """A client's predictions (P, C) to mix, and their log densities (P,)."""
        density = ClassGaussians(payload["mean"], payload["variance"])
        return super().read(payload)[0], log_density(payload["logits"], density)

    def step(self, server: fed.Server, aggregate: Mixed, cohort: fed.Cohort) -> dict[str, float]:
        """Keep the mixture for the next broadcast, and the mean weights by class."""
        metrics = super().step(server, aggregate, cohort)
        classes = server["targets"].argmax(1)
        counts = torch.bincount(classes, minlength=self.num_classes).double()
        rows = {client_id: row for row, client_id in enumerate(self._watched.tolist())}
        server["weights"].fill_(-1)  # for clients that did not take part, and classes the mixture never sees
        for client_id, weight in aggregate.weights.items():
            sums = torch.zeros_like(counts).index_add_(0, classes, weight)
            server["weights"][rows[client_id]] = torch.where(counts > 0, sums / counts, -1.0).float()
        return metrics

    def figures(self, server: fed.Server) -> dict[str, Figure]:
        """The client × class picture of the last round's mean weights."""
        if not server["mixed"]:
            return {}
        means = server["weights"].double()
        return {"weights": weights_picture(means.masked_fill(means < 0, torch.nan).cpu().numpy(), self._watched)}


def _labelled_logits(client: fed.Client, batch: Any) -> fed.Tensors:
    return {**logits_of(client, batch), "labels": client.targets(batch)}
