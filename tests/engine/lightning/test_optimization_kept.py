"""Optimizers whose state a client keeps over rounds: against arithmetic, and against torch's own uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lit_fed import Classifier, FederatedTrainer
from lit_fed.algorithm import Split
from lit_fed.codecs import TopK
from lit_fed.data import Digits
from lit_fed.errors import CheckpointError, ClientFailure, ConfigError
from lit_fed.methods import FedAvg, FedNova, FedPer
from lit_fed.protocols import ClientTest, PersonalTest
from lit_fed.seeding import torch_generator
from tests.methods.support import ByHand, Momentum, Rota
from tests.support import LeastSquares, Points, assert_same, fit, kept, trainer, weights

MOMENTUM = "optimizer/train/0/SGD/network.weight/momentum_buffer"


def final(made: FederatedTrainer) -> list[float]:
    found: list[float] = weights(made)["network.weight"].flatten().tolist()
    return found


class With(LeastSquares):
    """`LeastSquares` by any optimizer."""

    def __init__(self, make: Callable[[Any], optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def test_two_rounds_of_momentum_by_hand(tmp_path: Path) -> None:
    # η = ρ = ½, weights ¼ and ¾. Round 0: v = (−2, 0) and (0, −4): w = (¼·1, ¾·2) = (.25, 1.5).
    # Round 1: v = (½·(−2) − 1.75, 0) = (−2.75, 0): (1.625, 1.5); (0, ½·(−4) − 2.5) = (0, −4.5): (.25, 3.75).
    made = fit(tmp_path, Momentum(0.5), client_optimizer="kept")
    assert final(made) == [0.25 * 1.625 + 0.75 * 0.25, 0.25 * 1.5 + 0.75 * 3.75]
    assert [kept(made, client)[MOMENTUM].tolist() for client in (0, 1)] == [[[-2.75, 0.0]], [[0.0, -4.5]]]
    fresh = fit(tmp_path, Momentum(0.5))  # (.25 + ½·1.75, 1.5) and (.25, 1.5 + ½·2.5)
    assert final(fresh) == [0.25 * 1.125 + 0.75 * 0.25, 0.25 * 1.5 + 0.75 * 2.75]
    bytes_of = [{name: run.metrics[f"comm/{name}_bytes"] for name in ("uplink", "downlink")} for run in (made, fresh)]
    assert bytes_of == [{"uplink": 16, "downlink": 16}] * 2


def test_a_client_continues_where_it_last_trained(tmp_path: Path) -> None:
    # Client 0 in rounds 0 and 2, client 1 in round 1. Client 0: v = −2, w = (1, 0); client 1: v = −4, w = (1, 2).
    # Client 0: v = (½·(−2) + (1 − 2), 0) = (−2, 0): w = (2, 2).
    made = fit(tmp_path, Momentum(0.5), max_rounds=3, participation=Rota(), client_optimizer="kept")
    assert final(made) == [2.0, 2.0]


def test_several_optimizers_by_hand(tmp_path: Path) -> None:
    # One client, ρ = ½ for the weight and 0 for the bias, both with η = ½. f = w₁ + b, target 2.
    # Round 0: g = −2: w₁ = b = 1. Round 1: g = 0: v = −1: w₁ = 1.5, b = 1.
    made = fit(tmp_path, Two(), Points(1), client_optimizer="kept")
    assert [tensor.flatten().tolist() for tensor in weights(made).values()] == [[1.5, 0.0], [1.0]]


class Two(ByHand):
    """A momentum of ½ for the weight alone."""

    def configure_optimizers(self) -> Any:
        return [optim.SGD([self.network.weight], lr=0.5, momentum=0.5), optim.SGD([self.network.bias], lr=0.5)]


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "dampened": partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": partial(optim.Adam, lr=0.003, amsgrad=True),
    "adamw": partial(optim.AdamW, lr=0.003),
    "nadam": partial(optim.NAdam, lr=0.003),
    "adagrad": partial(optim.Adagrad, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.001, centered=True, momentum=0.5),
    "adafactor": partial(optim.Adafactor, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_client_is_an_uninterrupted_run_of_torch(name: str, tmp_path: Path) -> None:
    def task() -> Classifier:
        torch.manual_seed(0)
        return Classifier("mlp", input_shape=(1, 8, 8), network_args={"hidden": [8]}, optimizer=OPTIMIZERS[name])

    def data() -> Digits:
        return Digits(num_clients=1, max_train_samples=90, batch_size=20)  # the last batch is smaller

    made = fit(tmp_path, task(), data(), FedAvg(), max_rounds=3, client_optimizer="kept")
    network, own = task().network, data()
    own.setup("fit")
    optimizer = OPTIMIZERS[name](network.parameters())
    for round_idx in range(3):
        for x, y in own.train_loader(0, torch_generator(0, "train", round_idx, 0, "data")):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    assert_same({f"network.{n}": t for n, t in network.state_dict().items()}, weights(made))


def test_resumed_is_uninterrupted_and_groups_leave_it_to_single_clients(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, **more: Any) -> FederatedTrainer:
        return fit(tmp_path / folder, Momentum(0.5), max_rounds=rounds, client_optimizer="kept", **more)

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, ckpt_path="last")
    for other in (parts, run("auto", 4, executor="auto")):
        assert final(other) == final(whole)
        assert_same(kept(other, 1), kept(whole, 1))
    with pytest.raises(ConfigError, match=r"client_optimizer=kept continues each client's own optimizer; use sequ"):
        run("groups", 1, executor="vectorized")


def test_tests_and_fine_tuning_leave_it_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_rounds": 3, "client_optimizer": "kept"}
    plain = fit(tmp_path, Momentum(0.5), algorithm=FedPer(personal=["network"]), **settings, protocols=[])
    tested = [ClientTest(), PersonalTest(epochs=2)]
    other = fit(tmp_path, Momentum(0.5), algorithm=FedPer(personal=["network"]), **settings, protocols=tested)
    for client in (0, 1):
        assert_same(kept(other, client), kept(plain, client))
    # And it begins fresh: one step from 0 to (1, 0), two steps of a fresh optimizer to 1.5 + ½·½·2 = 2, loss 0.
    tuned = fit(tmp_path, Momentum(0.5), Points(1), **{**settings, "max_rounds": 1}, protocols=[PersonalTest(epochs=2)])
    # v = (1 − 2) = −1: 1.5; v = −½ − ½ = −1: 2.
    assert tuned.metrics["personal/loss_mean"] == 0.0


def test_a_phase_that_trains_other_parameters_later_continues_with_each(tmp_path: Path) -> None:
    # The weight trains in rounds 0 and 2 alone: v = −2, w = 1; round 1: w stays; round 2: v = ½·(−2) − 1 = −2, w = 2.
    made = fit(tmp_path, Momentum(0.5), Points(1), Alternating(), max_rounds=3, client_optimizer="kept")
    assert final(made) == [2.0, 0.0]


class Reminded(FedAvg):
    """Gives its clients a state that they do not keep, and from round 1 on a personal part."""

    def split(self, model: Any, round_idx: int) -> Split:
        names = tuple(model.parameters)
        return Split(names) if not round_idx else Split((), names)

    def initial_state(self, client: Any) -> dict[str, Tensor]:
        return {"one": torch.ones(())}

    def finish(self, client: Any) -> Any:
        assert (client.is_new, client.state.keys()) == ((True, {"one"}) if client.round_idx < 2 else (False, set()))
        return super().finish(client)


@pytest.mark.parametrize("settings", [{"client_optimizer": "kept"}, {"uplink_codec": TopK(0.5)}])
def test_a_client_that_keeps_nothing_for_its_method_is_new(tmp_path: Path, settings: dict[str, Any]) -> None:
    made = fit(tmp_path, Momentum(0.5), algorithm=Reminded(), max_rounds=3, **settings)
    assert kept(made, 0)


class Alternating(FedAvg):
    """Nothing trains in odd rounds."""

    def phases(self, client: Any) -> Any:
        phases = super().phases(client)
        for phase in phases if client.stage == "train" else ():
            phase.trains = list(client.model.parameters) if client.round_idx % 2 == 0 else []
        return phases if client.round_idx % 2 == 0 else []


class Counting(optim.SGD):
    """Keeps a number of Python."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().step(closure)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="client_optimizer is kept, and algorithm FedNova measures the steps of a fr"):
        fit(tmp_path, algorithm=FedNova(), client_optimizer="kept")
    with pytest.raises(ClientFailure, match="Counting has the state 'count', which is not a tensor"):
        fit(tmp_path, With(partial(Counting, lr=0.5)), client_optimizer="kept")
    with pytest.raises(ConfigError, match=r"trainer.client_optimizer is 'keep'; it must be 'fresh' or 'kept'"):
        trainer(tmp_path, client_optimizer="keep")


def test_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    def resume(task: Any, **more: Any) -> None:
        fit(tmp_path, task, max_rounds=3, ckpt_path="last", **more)

    fit(tmp_path, Momentum(0.5), client_optimizer="kept")
    with pytest.raises(CheckpointError, match=r"client 0 keeps the state of its optimizer; set trainer.client_optimi"):
        resume(Momentum(0.5))
    with pytest.raises(ClientFailure, match=r"a client keeps the state of SGD, and the model has Adam; resume with"):
        resume(With(partial(optim.Adam, lr=0.1)), client_optimizer="kept")
    resume(Momentum(0.5), client_optimizer="kept")


def test_a_state_of_another_shape_is_refused() -> None:
    from lit_fed.engine.lightning.optimization import load_state

    parameter = nn.Parameter(torch.zeros(3))
    odd: dict[str, Tensor] = {"train/0/SGD/w/momentum_buffer": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"a client keeps 'momentum_buffer' \(4,\) of 'w', which is \(3,\)"):
        load_state([optim.SGD([parameter], 0.1, 0.9)], odd, {id(parameter): "w"}, "train")
