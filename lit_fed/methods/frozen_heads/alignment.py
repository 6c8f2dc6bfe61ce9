"""The effect of local training on features: alignment with classes, and distance from the global model's features.

The analyses of Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global Feature Distillation for
Federated Learning", 2024, Figures 2 to 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.callbacks import Callback, RoundRecord, Run
from lit_fed.callbacks.boards import show_picture, takes_pictures
from lit_fed.callbacks.pictures import curves_picture
from lit_fed.checks import check_range
from lit_fed.data.population.pictures import render
from lit_fed.errors import ConfigError
from lit_fed.methods.regularizers import declared
from lit_fed.networks import class_cosines
from lit_fed.participation import Participant
from lit_fed.protocols import Federation
from lit_fed.seeding import numpy_generator

_GROUPS = ("unobserved", "observed")  # indexed by whether the class is observed
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

    A client observes the classes of its training samples; each value is a mean over the shared test samples of these
    (or of the other) classes, then over the round's cohort, each client once. With f and v the local model's features
    and classes, :math:`f^g` and :math:`v^g` the downloaded model's:

    - ``alignment/…``: :math:`\cos(f, v_y)`; ``alignment/gap_…``: :math:`\cos(f, v_y) - \cos(f^g, v^g_y)`;
    - ``alignment/acc_…``: accuracy; ``alignment/acc_gap_…``: accuracy minus the downloaded model's;
    - ``features/distance_…``: :math:`\|f - f^g\|`; ``features/angle_…``: the angle between f and :math:`f^g`, in
      degrees; ``features/norm_difference_…``: :math:`|\|f\| - \|f^g\||`;

    each ending in ``observed`` or ``unobserved``, in the round's metrics, and as curves in a picture at the end.
    Training is unaffected: weights are the same bit for bit.

    Args:
        every_n_rounds: Interval between tests, in rounds; the last round is always tested.
        max_test_samples: Size of a fixed random subset to test on; None for all samples.

    Raises:
        ConfigError: For numbers below 1; before training, without features, classes or a global model, or if clients
            do not send their whole model.

    Note:
        The angle in degrees and the absolute difference of the norms are our reading; the paper names the quantities
        and shows their curves. If a head projects features first (FedETF), alignment uses the projected features. A
        local model is the client's payload, before any codec, over the downloaded model: with
        ``trainer.buffers=server`` its buffers are the server's. Clients whose update is lost later count; a client that
        observes every class has no value for unobserved classes.
    """

    def __init__(self, every_n_rounds: int = 1, max_test_samples: int | None = None) -> None:
        self.every_n_rounds = check_range("Alignment.every_n_rounds", every_n_rounds, least=1)
        self.max_test_samples = check_range("Alignment.max_test_samples", max_test_samples, least=1, null="for all")
        self.rounds: list[int] = []
        self.curves: dict[str, list[float]] = {}
        self._measures = False
        self._chosen: list[Any] | None = None
        self._global_model: dict[str, Tensor] = {}
        self._downloaded: list[tuple[Tensor, Tensor, Tensor]] = []
        self._client_metrics: list[tuple[int, dict[str, float]]] = []

    def on_fit_start(self, run: Run) -> None:
        """Choose the test samples; check for features, classes, and updates that hold whole models."""
        federation = run.federation
        loop, head = self._parts(federation)
        for name in loop.model.personal_names:
            instead = "set trainer.buffers to average" if name in loop.model.buffers else "leave the callback out"
            raise ConfigError(
                f"callback Alignment tests the models that clients send, and under algorithm "
                f"{type(federation.algorithm).__name__} they keep {name}; {instead}"
            )
        if not run.start_round:
            self.rounds, self.curves = [], {}
        self._chosen = self._choose(federation)
        batch = next(iter(self._batches(federation)))
        with _observing(loop, head) as view:
            view(batch)

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Decide whether to test this round's clients, and keep their download."""
        done = round_idx + 1
        self._measures = done % self.every_n_rounds == 0 or done == run.max_rounds
        self._client_metrics, self._downloaded, self._global_model = [], [], {}
        if self._measures:
            (kind,), broadcast = run.federation.kinds.names, run.federation.broadcast(round_idx)
            model = run.federation.loops[kind].model
            sent = {name: tensor for name, tensor in broadcast.payloads[kind].items() if name in model}
            self._global_model = {**broadcast.frozen[kind], **sent}

    def on_client_end(self, run: Run, update: fed.ClientUpdate) -> None:
        """Test the client's model: its payload over its download."""
        if self._measures:
            self._client_metrics.append((update.client_id, self._test(run.federation, update)))

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Add the means over the clients of all processes to the round's metrics."""
        if not self._measures:
            return
        self._downloaded = []
        parts = run.workers.gather(self._client_metrics)
        values: dict[str, list[float]] = {}
        for _, metrics_there in sorted((row for part in parts for row in part), key=lambda row: row[0]):
            for name, value in metrics_there.items():
                values.setdefault(name, []).append(value)
        means = {name: float(np.mean(column)) for name, column in values.items()}
        record.metrics.update(means)
        self.rounds.append(record.round_idx)
        for name in (prefix + group for prefix in _TITLES for group in _GROUPS):
            self.curves.setdefault(name, []).append(means.get(name, float("nan")))

    def on_fit_end(self, run: Run) -> None:
        """Draw the curves."""
        if self.rounds and takes_pictures(run):
            panels = {
                title: {group: self.curves[prefix + group] for group in _GROUPS} for prefix, title in _TITLES.items()
            }
            show_picture(run, "pictures/alignment", render(curves_picture(self.rounds, panels)), self.rounds[-1])

    def state_dict(self) -> dict[str, Any]:
        """The curves so far."""
        return {"rounds": self.rounds, "curves": self.curves}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds, self.curves = state["rounds"], state["curves"]

    def _test(self, federation: Federation, update: fed.ClientUpdate) -> dict[str, float]:
        loop, head = self._parts(federation)
        observed = torch.from_numpy(federation.data.census.class_counts(update.client_id) > 0).to(
            federation.fabric.device
        )
        for name in loop.model.shared_names("up"):
            if name not in update.payload:
                raise ConfigError(f"callback Alignment tests the models that clients send, and they do not send {name}")
        local = {name: update.payload.get(name, tensor) for name, tensor in self._global_model.items()}
        totals: Tensor | None = None
        with _observing(loop, head) as view:
            for position, batch in enumerate(self._batches(federation)):
                if position == len(self._downloaded):
                    self._downloaded.append(view(batch, self._global_model))
                y = loop.state.client.targets(batch)
                values = _compare(view(batch, local), self._downloaded[position], y)
                group = F.one_hot(observed[y].long(), len(_GROUPS)).to(values)
                sums = group.T @ torch.cat([values, torch.ones_like(values[:, :1])], dim=1)
                totals = sums if totals is None else totals + sums
        if totals is None:
            return {}
        found: dict[str, float] = {}
        for name, (*sums_of, count) in zip(_GROUPS, totals.tolist(), strict=True):
            if count:
                found |= {prefix + name: total / count for prefix, total in zip(_TITLES, sums_of, strict=True)}
        return found

    def _parts(self, federation: Federation) -> tuple[fed.LocalLoop, nn.Module]:
        """The task of a federation with one global model, and its head."""
        loops = list(federation.loops.values())
        if len(loops) > 1 or not federation.global_model(0):
            raise ConfigError(
                f"callback Alignment needs one global model, and algorithm {type(federation.algorithm).__name__} has "
                f"{'several' if len(loops) > 1 else 'none'}"
            )
        task = loops[0].model.task
        head = fed.head_of(task, federation.algorithm.head)
        if head is None or federation.data.num_classes is None:
            missing = fed.NEEDS["features"] if head is None else fed.NEEDS["targets"]
            raise ConfigError(
                f"callback Alignment needs {missing}; model {fed.task_name(task)} with these data has none"
            )
        return loops[0], head

    def _batches(self, federation: Federation) -> Iterable[Any]:
        if self._chosen is not None:
            return self._chosen
        return self._parts(federation)[0].batches(federation.data.test_loader())

    def _choose(self, federation: Federation) -> list[Any] | None:
        """A fixed random subset of the shared test samples, in batches; None for all samples."""
        loader, most = federation.data.test_loader(), self.max_test_samples
        if most is None or most >= loader.num_samples:
            return None
        keep = torch.zeros(loader.num_samples, dtype=torch.bool)
        keep[numpy_generator(federation.seed, "alignment").choice(loader.num_samples, most, replace=False)] = True
        parts, start = [], 0
        for batch in self._parts(federation)[0].batches(loader):
            chosen = keep[start : start + fed.batch_size_of(batch)]
            start += len(chosen)
            parts.append(_rows(batch, chosen))
        size, whole = federation.data.shared_batch_size, _join(parts)
        return [_rows(whole, slice(at, at + size)) for at in range(0, most, size)]


View = Callable[..., tuple[Tensor, Tensor, Tensor]]


@contextmanager
def _observing(loop: fed.LocalLoop, head: nn.Module) -> Iterator[View]:
    """A task's logits (B, C), features (B, d) and cosines with every class (B, C) for a batch, and for given tensors.

    In evaluation mode, without gradients or logging.
    """
    seen = _Seen(loop.objective, head)

    def view(batch: Any, tensors: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        renamed = {f"objective.{name}": tensor for name, tensor in (tensors or {}).items()}
        view_outputs: tuple[Tensor, Tensor, Tensor] = functional_call(seen, renamed, (batch,))
        return view_outputs

    task_run = loop.state.task_run
    with torch.no_grad(), loop.model.evaluating(), task_run.muted(), task_run.observing(head), loop.fabric.autocast():
        yield view


class _Seen(nn.Module):
    """An objective's features and logits, and its cosines."""

    def __init__(self, objective: fed.Objective, head: nn.Module) -> None:
        super().__init__()
        self.objective = objective
        self.heads = [head]  # in a list, so that it is not a submodule and its tensors keep one name

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, logits, features = self.objective.run(batch)
        return declared(logits), declared(features), class_cosines(self.heads[0], declared(features))


def _rows(batch: Any, chosen: Tensor | slice) -> Any:
    """A selection of the samples of a batch of any nesting."""
    return fed.map_tensors(
        batch, lambda tensor: tensor[chosen.to(tensor.device) if isinstance(chosen, Tensor) else chosen]
    )


def _join(batches: Sequence[Any]) -> Any:
    """Join batches of any nesting."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {key: _join([batch[key] for batch in batches]) for key in first}
    return type(first)(_join(parts) for parts in zip(*batches, strict=True))


def _compare(local: tuple[Tensor, Tensor, Tensor], taught: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """Per sample the values of `_TITLES`, (B, 7), in float64."""
    of_label = [cosines.double().gather(1, y.unsqueeze(1)).squeeze(1) for _, _, cosines in (local, taught)]
    right = [(logits.argmax(dim=1) == y).double() for logits, _, _ in (local, taught)]
    f, g = local[1].double(), taught[1].double()
    angle = torch.rad2deg(torch.acos(F.cosine_similarity(f, g, dim=1).clamp(-1, 1)))
    norms = (f.norm(dim=1) - g.norm(dim=1)).abs()
    values = (of_label[0], right[0], (f - g).norm(dim=1), norms, of_label[0] - of_label[1], right[0] - right[1], angle)
    return torch.stack(values, dim=1)
