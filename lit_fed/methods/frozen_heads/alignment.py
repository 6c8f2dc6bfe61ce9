"""What local training does to features: how well they fit their classes, and how far they move from the global model's.

The analyses of Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global Feature Distillation for
Federated Learning", 2024, Figures 2 to 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lit_fed.callbacks.base import Callback, RoundRecord
from lit_fed.callbacks.dashboard import tensorboard_writers
from lit_fed.callbacks.pictures import curves_picture, render
from lit_fed.classifier import Classifier
from lit_fed.errors import ConfigError
from lit_fed.networks import class_cosines, classifier, run
from lit_fed.participation import Participant
from lit_fed.engine.payload import ClientUpdate
from lit_fed.seeding import numpy_generator

if TYPE_CHECKING:
    from lit_fed.federation import Federation
    from lit_fed.trainer import FederatedTrainer

_GROUPS = ("unobserved", "observed")  # the position is whether the class is observed
_TITLES = {
    "alignment/": "alignment",
    "alignment/acc_": "accuracy",
    "features/distance_": "feature distance",
    "features/norm_difference_": "feature norm difference",
    "alignment/gap_": "alignment gap",
    "alignment/acc_gap_": "accuracy gap",
    "features/angle_": "feature angle (degrees)",
}


class Alignment(Callback):
    r"""Tests local models, after their training and before aggregation, on observed and unobserved classes.

    A client's observed classes are those it has training samples of; each value is a mean over the shared test samples
    of these (or of the other) classes, then over the round's cohort, every client counted once. With f and v the local
    model's features and classes, :math:`f^g` and :math:`v^g` the downloaded one's:

    - ``alignment/…``: :math:`\cos(f, v_y)`; ``alignment/gap_…``: :math:`\cos(f, v_y) - \cos(f^g, v^g_y)`;
    - ``alignment/acc_…``: accuracy; ``alignment/acc_gap_…``: accuracy minus the downloaded model's;
    - ``features/distance_…``: :math:`\|f - f^g\|`; ``features/angle_…``: the angle between the two, in degrees;
      ``features/norm_difference_…``: :math:`|\|f\| - \|f^g\||`;

    each ending in ``observed`` or ``unobserved``, in the round's metrics, and as curves in a picture at the end.
    Training does not notice: weights are the same to the bit.

    Args:
        every_n_rounds: Test in every so many rounds, and in the last.
        max_test_samples: Test on a fixed random choice of so many samples; None for all of them.

    Raises:
        ConfigError: For numbers below 1, and before training for a model without features or classes.

    Note:
        The angle in degrees and the absolute difference of the norms are our reading; the paper names the quantities
        and shows their curves. Where a head projects features first (FedETF), alignment is that of the projected
        features. Clients whose work is lost afterwards count, and a client that observes every class has no value for
        the others.
    """

    def __init__(self, every_n_rounds: int = 1, max_test_samples: int | None = None) -> None:
        for key, value in (("every_n_rounds", every_n_rounds), ("max_test_samples", max_test_samples)):
            if value is not None and value < 1:
                raise ConfigError(f"Alignment.{key} is {value}; it must be at least 1")
        self.every_n_rounds = every_n_rounds
        self.max_test_samples = max_test_samples
        self.rounds: list[int] = []
        self.curves: dict[str, list[float]] = {}
        self._due = False
        self._chosen: list[tuple[Tensor, Tensor]] | None = None
        self._downloaded: list[tuple[Tensor, Tensor, Tensor]] = []
        self._found: list[tuple[int, dict[str, float]]] = []

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Choose the test samples, and see that the model has features and classes."""
        federation = trainer.federation
        assert federation is not None
        module = federation.module
        if not isinstance(module, Classifier):
            raise ConfigError(f"callback Alignment needs a Classifier, and model {type(module).__name__} is none")
        if not trainer.start_round:
            self.rounds, self.curves = [], {}
        self._chosen = self._choose(federation)
        x, _ = next(iter(self._batches(federation)))
        with _evaluating(module.network), torch.no_grad(), federation.fabric.autocast():
            _View(module.network)(x[:2])

    def on_round_start(self, trainer: FederatedTrainer, round_idx: int, plan: Sequence[Participant]) -> None:
        """Decide whether this round's clients are tested."""
        done = round_idx + 1
        self._due = done % self.every_n_rounds == 0 or done == trainer.max_rounds
        self._found, self._downloaded = [], []

    def on_client_end(self, trainer: FederatedTrainer, update: ClientUpdate) -> None:
        """Test the client's model, which the module still holds."""
        if not self._due:
            return
        federation = trainer.federation
        assert federation is not None
        assert isinstance(federation.module, Classifier)
        self._found.append((update.client_id, self._test(federation, federation.module, update.client_id)))

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Average over the clients of all processes, and add to the round's metrics."""
        if not self._due:
            return
        assert trainer.federation is not None
        self._downloaded = []
        parts = trainer.federation.workers.gather(self._found)
        values: dict[str, list[float]] = {}
        for _, found in sorted((row for part in parts for row in part), key=lambda row: row[0]):
            for name, value in found.items():
                values.setdefault(name, []).append(value)
        means = {name: float(np.mean(column)) for name, column in values.items()}
        record.metrics.update(means)
        self.rounds.append(record.round_idx)
        for name in (prefix + group for prefix in _TITLES for group in _GROUPS):
            self.curves.setdefault(name, []).append(means.get(name, float("nan")))

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """Draw the curves."""
        if self.rounds and (writers := tensorboard_writers(trainer)):
            panels = {
                title: {group: self.curves[prefix + group] for group in _GROUPS} for prefix, title in _TITLES.items()
            }
            picture = render(curves_picture(self.rounds, panels))
            for writer in writers:
                writer.add_image("pictures/alignment", picture, self.rounds[-1], dataformats="HWC")

    def state_dict(self) -> dict[str, Any]:
        """The curves so far."""
        return {"rounds": self.rounds, "curves": self.curves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.rounds, self.curves = state["rounds"], state["curves"]

    @torch.no_grad()
    def _test(self, federation: Federation, module: Classifier, client_id: int) -> dict[str, float]:
        observed = torch.from_numpy(federation.data.class_counts(client_id) > 0).to(federation.fabric.device)
        view = _View(module.network)
        totals: Tensor | None = None
        with _evaluating(module.network), federation.fabric.autocast():
            for position, (x, y) in enumerate(self._batches(federation)):
                if position == len(self._downloaded):
                    taught: tuple[Tensor, Tensor, Tensor] = functional_call(view, dict(module.downloaded), (x,))
                    self._downloaded.append(taught)
                values = _compare(view(x), self._downloaded[position], y)
                group = F.one_hot(observed[y].long(), len(_GROUPS)).to(values)
                batch = group.T @ torch.cat([values, torch.ones_like(values[:, :1])], dim=1)
                totals = batch if totals is None else totals + batch
        if module.work.personal:  # what the next client downloads differs in its own part
            self._downloaded = []
        if totals is None:
            return {}
        found: dict[str, float] = {}
        for name, (*sums, count) in zip(_GROUPS, totals.tolist(), strict=True):
            if count:
                found |= {prefix + name: total / count for prefix, total in zip(_TITLES, sums, strict=True)}
        return found

    def _batches(self, federation: Federation) -> Iterable[tuple[Tensor, Tensor]]:
        if self._chosen is not None:
            return self._chosen
        return federation.loop.batches(federation.data.test_loader())

    def _choose(self, federation: Federation) -> list[tuple[Tensor, Tensor]] | None:
        """A fixed random choice of the shared test samples, in batches; None for all of them."""
        loader, most = federation.data.test_loader(), self.max_test_samples
        if most is None or most >= loader.num_samples:
            return None
        keep = np.zeros(loader.num_samples, dtype=bool)
        keep[numpy_generator(federation.seed, "alignment").choice(loader.num_samples, most, replace=False)] = True
        parts, start = [], 0
        for x, y in federation.loop.batches(loader):
            chosen = torch.from_numpy(keep[start : start + len(y)]).to(y.device)
            parts.append((x[chosen], y[chosen]))
            start += len(y)
        xs, ys = (torch.cat(column).split(federation.data.test_batch_size) for column in zip(*parts, strict=True))
        return list(zip(xs, ys, strict=True))


class _View(nn.Module):
    """A network's logits (B, C), features (B, d) and cosines with every class (B, C)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, features = run(self.network, x, True)
        assert features is not None
        return logits, features, class_cosines(classifier(self.network), features)


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)


def _compare(local: tuple[Tensor, Tensor, Tensor], taught: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """Per sample the values of `_TITLES`, (B, 7), in float64."""
    own = [cosines.double().gather(1, y.unsqueeze(1)).squeeze(1) for _, _, cosines in (local, taught)]
    right = [(logits.argmax(dim=1) == y).double() for logits, _, _ in (local, taught)]
    f, g = local[1].double(), taught[1].double()
    angle = torch.rad2deg(torch.acos(F.cosine_similarity(f, g, dim=1).clamp(-1, 1)))
    norms = (f.norm(dim=1) - g.norm(dim=1)).abs()
    values = (own[0], right[0], (f - g).norm(dim=1), norms, own[0] - own[1], right[0] - right[1], angle)
    return torch.stack(values, dim=1)
