"""What all servers that step on the mean movement share: buffers, parts that do not travel, state, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Classifier, Split
from lit_fed.data import Digits
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import (
    CountsSteps,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedExP,
    FedNovaServer,
    FedYogi,
    ServerOptimizer,
)
from lit_fed.networks import SmallCNN
from lit_fed.payload import Payload
from tests.support import LeastSquares, Points, Wanderer, assert_same, fit, weights
from tests.test_families import Thawing

ALL = [FedAvgM, FedAdam, FedYogi, FedAdagrad, FedNovaServer, FedExP]
EACH = pytest.mark.parametrize("kind", ALL)
STATEFUL = pytest.mark.parametrize("kind", [FedAvgM, FedAdam, FedYogi, FedAdagrad, FedExP])


class CountingWanderer(CountsSteps, Wanderer):
    """Batch norm, a personal parameter and dropout."""


class CountingThaw(CountsSteps, Thawing):
    """Freezes a layer after the second round, when every server has a past."""

    def split(self, round_idx: int) -> Split:
        return super().split(max(round_idx - 1, 0))


class Plain(ServerOptimizer):
    """The least a server has to say: it goes where the mean is."""

    def movement(self, delta: dict[str, Tensor], extra: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return delta, {}


def wander(folder: Path, algorithm: FedAvg, rounds: int = 1, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fit(folder, CountingWanderer(), Points(sizes=(2, 3)), algorithm, max_rounds=rounds, **kwargs)


def thaw(folder: Path, algorithm: FedAvg, rounds: int, module: type[Classifier] = CountingThaw, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    client = module(network=SmallCNN(width=4), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return fit(folder, client, Digits(num_clients=4, max_train_samples=400), algorithm, max_rounds=rounds, **kwargs)


def test_going_to_the_mean_is_fedavg(tmp_path: Path) -> None:
    plain = fit(tmp_path, LeastSquares(local_epochs=2), Points(), FedAvg(), max_rounds=3)
    other = fit(tmp_path, LeastSquares(local_epochs=2), Points(), Plain(), max_rounds=3)
    torch.testing.assert_close(weights(other), weights(plain), rtol=1e-6, atol=1e-6)
    # From the first round's mean (0.375, 2.25), see tests/methods/test_fedprox.py, its norm.
    first = fit(tmp_path, LeastSquares(local_epochs=2), Points(), Plain(), max_rounds=1)
    assert first.metrics["server/update_norm"] == pytest.approx((0.375**2 + 2.25**2) ** 0.5)


@EACH
def test_buffers_are_replaced_by_their_mean(kind: Callable[[], FedAvg], tmp_path: Path) -> None:
    class Wandering(Wanderer):
        pass

    torch.manual_seed(0)
    plain = fit(tmp_path / "plain", Wandering(), Points(sizes=(2, 3)), FedAvg(), max_rounds=1)
    other = wander(tmp_path / "other", kind())
    buffers = [name for name, _ in plain.federation.module.named_buffers()]
    assert len(buffers) == 3
    for name in buffers:  # the running mean and variance, and an integer count
        assert torch.equal(weights(plain)[name], weights(other)[name]), name
    kept = {name for slot in other.federation.algorithm.slots.values() for name in slot}
    assert not kept & {*buffers, "network.3.weight", "network.3.bias"}, "a buffer or a personal part has a slot"


@EACH
def test_resumes_with_parts_that_do_not_travel(kind: Callable[[], FedAvg], tmp_path: Path) -> None:
    for run in (wander, thaw):
        whole = run(tmp_path / run.__name__ / "whole", kind(), 4)
        run(tmp_path / run.__name__ / "parts", kind(), 2)
        parts = run(tmp_path / run.__name__ / "parts", kind(), 4, ckpt_path="last")
        assert_same(weights(whole), weights(parts))
        states = [made.federation.algorithm.state_dict() for made in (whole, parts)]
        torch.testing.assert_close(*states, rtol=0, atol=0)


@EACH
def test_what_is_frozen_stays(kind: Callable[[], FedAvg], tmp_path: Path) -> None:
    """Whatever momentum the server has, and every client trains with the same frozen part."""
    seen: list[Tensor] = []

    class Watched(CountingThaw):
        def on_train_start(self) -> None:
            super().on_train_start()
            seen.append(self.tensor("network.body.0.weight").clone())

    made = thaw(tmp_path, kind(), 4, Watched)
    before, later = seen[:8], seen[8:]
    assert len(later) == 8
    assert not torch.equal(before[-1], later[0])
    assert all(torch.equal(frozen, weights(made)["network.body.0.weight"]) for frozen in later)


@STATEFUL
def test_a_foreign_slot_is_refused(kind: Callable[[], FedAvg], tmp_path: Path) -> None:
    algorithm = fit(tmp_path, algorithm=kind(), max_rounds=2).federation.algorithm  # type: ignore[union-attr]
    for name, tensor in (("network.weight", torch.zeros(3, 2)), ("network.bias", torch.zeros(1))):
        state = algorithm.state_dict()
        slot = next(iter(state["slots"]))
        state = state | {"slots": {slot: {name: tensor}}}
        with pytest.raises(CheckpointError, match=f"another model: its {slot} of '{name}' does not fit"):
            algorithm.load_state_dict(state)


def test_another_methods_checkpoint_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, algorithm=FedAvg(), max_rounds=1)
    with pytest.raises(CheckpointError, match="saved by another method than FedAvgM"):
        fit(tmp_path, algorithm=FedAvgM(), max_rounds=2, ckpt_path="last")


@STATEFUL
def test_the_checkpoint_shares_no_memory_with_the_server_that_loads_it(
    kind: Callable[[], FedAvg], tmp_path: Path
) -> None:
    algorithm = fit(tmp_path, algorithm=kind(), max_rounds=2).federation.algorithm  # type: ignore[union-attr]
    state = algorithm.state_dict()
    saved = {slot: dict(tensors) for slot, tensors in state["slots"].items()}
    algorithm.load_state_dict(state)
    for slot, tensors in saved.items():
        for name, tensor in tensors.items():
            assert torch.equal(algorithm.slots[slot][name], tensor)  # type: ignore[attr-defined]
            assert algorithm.slots[slot][name].data_ptr() != tensor.data_ptr()  # type: ignore[attr-defined]


def test_a_second_run_starts_without_the_firsts_momentum(tmp_path: Path) -> None:
    algorithm = FedAvgM()
    first = weights(fit(tmp_path, algorithm=algorithm, max_rounds=2))
    assert_same(first, weights(fit(tmp_path, algorithm=algorithm, max_rounds=2)))


@EACH
def test_runs_in_16_bit(kind: Callable[[], FedAvg], tmp_path: Path) -> None:
    made = wander(tmp_path, kind(), 2, precision="bf16-true")
    state = weights(made)
    assert all(tensor.dtype == torch.bfloat16 for tensor in state.values() if tensor.is_floating_point())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvgM(beta=1.0), r"algorithm.beta is 1.0; it must be at least 0 and below 1"),
        (lambda: FedAvgM(server_lr=-1), r"algorithm.server_lr is -1; it must be positive"),
        (lambda: FedAdam(server_lr=0.0), r"algorithm.server_lr is 0.0; it must be positive"),
        (lambda: FedAdam(beta1=-0.1), r"algorithm.beta1 is -0.1; it must be at least 0 and below 1"),
        (lambda: FedYogi(beta2=1), r"algorithm.beta2 is 1; it must be at least 0 and below 1"),
        (lambda: FedAdagrad(tau=0.0), r"algorithm.tau is 0.0; it must be positive"),
        (lambda: FedAdagrad(beta1=float("nan")), r"algorithm.beta1 is nan; it must be at least 0 and below 1"),
        (lambda: FedNovaServer(server_lr=0), r"algorithm.server_lr is 0; it must be positive"),
        (lambda: FedExP(epsilon=0), r"algorithm.epsilon is 0; it must be positive"),
        (lambda: FedExP(weighting="size"), r"algorithm.weighting is 'size'"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work(make: Callable[[], FedAvg], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
