"""What all servers that step on the mean movement share: buffers, parts that do not travel, state, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Classifier, Model, Payload, Split
from lit_fed.data import Digits
from lit_fed.engine.method.algorithm import Server
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedExP, FedNova, FedYogi, ServerOptimizer
from lit_fed.networks import SmallCNN
from tests.support import Points, Wanderer, Wandering, assert_same, fit, weights

ALL = [FedAvgM, FedAdam, FedYogi, FedAdagrad, FedNova, FedExP]
EACH = pytest.mark.parametrize("kind", ALL)


class Freezing(FedAvg):
    """Freezes a layer after the second round, when every server has a past; the head is personal."""

    def split(self, model: Model, round_idx: int) -> Split:
        names = list(model.parameters)
        frozen = tuple(name for name in names if name.startswith("network.body.0")) if round_idx >= 2 else ()
        personal = tuple(name for name in names if name.startswith("network.head"))
        return Split(tuple(name for name in names if name not in (*frozen, *personal)), personal, frozen)


class Plain(ServerOptimizer):
    """The least a server has to say: it goes where the mean is."""

    def movement(self, server: Server, delta: dict[str, Tensor], extra: Payload) -> tuple[dict[str, Tensor], Any]:
        return delta, {}


def mixed(part: type[FedAvg], kind: type[FedAvg]) -> FedAvg:
    """A server under clients that keep a part of the model, or a state."""
    made: FedAvg = type(f"{part.__name__}{kind.__name__}", (part, kind), {"needs": part.needs | kind.needs})()
    return made


def wander(folder: Path, kind: type[FedAvg], rounds: int = 1, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fit(folder, Wanderer(), Points(sizes=(2, 3)), mixed(Wandering, kind), max_rounds=rounds, **kwargs)


def freeze(folder: Path, kind: type[FedAvg], rounds: int, task: type[Classifier] = Classifier, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    module, data = task(SmallCNN(width=4)), Digits(num_clients=4, max_train_samples=400)
    return fit(folder, module, data, mixed(Freezing, kind), max_rounds=rounds, **kwargs)


def test_going_to_the_mean_is_fedavg(tmp_path: Path) -> None:
    plain = fit(tmp_path, algorithm=FedAvg(), max_rounds=3, local_epochs=2)
    other = fit(tmp_path, algorithm=Plain(), max_rounds=3, local_epochs=2)
    torch.testing.assert_close(weights(other), weights(plain), rtol=1e-6, atol=1e-6)
    # From the first round's mean (0.375, 2.25), see tests/methods/test_fedprox.py, its norm.
    first = fit(tmp_path, algorithm=Plain(), max_rounds=1, local_epochs=2)
    assert first.metrics["server/update_norm"] == pytest.approx((0.375**2 + 2.25**2) ** 0.5)


@EACH
def test_buffers_are_replaced_by_their_mean(kind: type[FedAvg], tmp_path: Path) -> None:
    plain, other = wander(tmp_path / "plain", FedAvg), wander(tmp_path / "other", kind)
    buffers = [name for name, _ in Wanderer().named_buffers()]
    assert len(buffers) == 3
    for name in buffers:  # the running mean and variance, and an integer count
        assert torch.equal(weights(plain)[name], weights(other)[name]), name
    server = other.run.federation.server
    kept = {name for key in server if key != "model" for name in server[key] or ()}
    assert not kept & {*buffers, "network.3.weight", "network.3.bias"}, "a buffer or a personal part has a slot"


@EACH
def test_resumes_with_parts_that_do_not_travel(kind: type[FedAvg], tmp_path: Path) -> None:
    for run in (wander, freeze):
        whole = run(tmp_path / run.__name__ / "whole", kind, 4)
        run(tmp_path / run.__name__ / "parts", kind, 2)
        parts = run(tmp_path / run.__name__ / "parts", kind, 4, ckpt_path="last")
        assert_same(weights(whole), weights(parts))
        states = [made.run.federation.server for made in (whole, parts)]
        torch.testing.assert_close(*states, rtol=0, atol=0)


@EACH
def test_what_is_frozen_stays(kind: type[FedAvg], tmp_path: Path) -> None:
    """Whatever momentum the server has, and every client trains with the same frozen part."""
    seen: list[Tensor] = []

    class Watched(Classifier):
        def on_train_start(self) -> None:
            seen.append(self.network.get_parameter("body.0.weight").detach().clone())

    made = freeze(tmp_path, kind, 4, Watched)
    before, later = seen[:8], seen[8:]
    assert len(later) == 8
    assert not torch.equal(before[-1], later[0])
    assert all(torch.equal(frozen, weights(made)["network.body.0.weight"]) for frozen in later)


METHODS = [FedAvg, FedNova, FedExP, FedAvgM, FedAdam, FedYogi, FedAdagrad]


@pytest.mark.parametrize("after", METHODS)
@pytest.mark.parametrize("before", METHODS)
def test_a_server_goes_on_only_from_what_it_would_keep_itself(
    tmp_path: Path, before: type[FedAvg], after: type[FedAvg]
) -> None:
    """Nothing, a previous iterate, a momentum, two moments that are means, a moment and a sum."""
    keeps = {FedAvg: 0, FedNova: 0, FedExP: 1, FedAvgM: 2, FedAdam: 3, FedYogi: 3, FedAdagrad: 4}
    run = fit(tmp_path, algorithm=before(), max_rounds=2).log_dir
    if keeps[before] == keeps[after]:
        assert fit(tmp_path, algorithm=after(), max_rounds=3, ckpt_path="last").run.start_round == 2
        return
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused = (
        rf"saved by {before.__name__} on \w+ and does not fit {after.__name__} on \w+: the server's state has '\w+'"
    )
    with pytest.raises(CheckpointError, match=refused):
        fit(tmp_path, algorithm=after(), max_rounds=3, ckpt_path="last")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == kept


def test_a_second_run_starts_without_the_firsts_momentum(tmp_path: Path) -> None:
    algorithm = FedAvgM()
    first = weights(fit(tmp_path, algorithm=algorithm, max_rounds=2))
    assert_same(first, weights(fit(tmp_path, algorithm=algorithm, max_rounds=2)))


@EACH
def test_runs_in_16_bit(kind: type[FedAvg], tmp_path: Path) -> None:
    made = wander(tmp_path, kind, 2, precision="bf16-true")
    state = weights(made)
    assert all(tensor.dtype == torch.bfloat16 for tensor in state.values() if tensor.is_floating_point())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvgM(beta=1.0), r"algorithm.beta is 1.0; it must be at least 0 and below 1"),
        (lambda: FedAvgM(server_lr=-1), r"algorithm.server_lr is -1; it must be above 0"),
        (lambda: FedAdam(server_lr=0.0), r"algorithm.server_lr is 0.0; it must be above 0"),
        (lambda: FedAdam(beta1=-0.1), r"algorithm.beta1 is -0.1; it must be at least 0 and below 1"),
        (lambda: FedYogi(beta2=1), r"algorithm.beta2 is 1; it must be at least 0 and below 1"),
        (lambda: FedAdagrad(tau=0.0), r"algorithm.tau is 0.0; it must be above 0"),
        (lambda: FedAdagrad(beta1=float("nan")), r"algorithm.beta1 is nan; it must be at least 0 and below 1"),
        (lambda: FedNova(server_lr=0), r"algorithm.server_lr is 0; it must be above 0"),
        (lambda: FedExP(epsilon=0), r"algorithm.epsilon is 0; it must be above 0"),
        (lambda: FedExP(weighting="size"), r"algorithm.weighting is 'size'"),
    ],
)
def test_settings_that_cannot_work(make: Callable[[], FedAvg], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
