"""FedPer, LG-FedAvg, FedRep, Ditto, Per-FedAvg and local training against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has three samples x = (0, 1), y = 4; learning rate ½.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed import Classifier, Model, objective_of
from lit_fed.data import Digits
from lit_fed.engine.lightning.compatibility import check_optimization
from lit_fed.engine.lightning.task_trainer import GradientOptions
from lit_fed.errors import ConfigError
from lit_fed.methods import LD, Ditto, FedBABU, FedPer, FedRep, LGFedAvg, LocalOnly, PerFedAvg, Prox
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.methods.support import Automatic, ByHand, client_state, global_weight, run_quickstart
from tests.support import LeastSquares, Points, assert_same, client_states, fit, saved_weights, weights


class WithBias(LeastSquares):
    """f(x) = w·x + b from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 1)
        nn.init.zeros_(self.network.weight)
        nn.init.zeros_(self.network.bias)


BIAS = ["network.bias"]


def test_fedper_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: client 0: residual −2 → w₁ = b = 1; client 1: −4 → w₂ = b = 2; shared (1/4, 3·2/4) = (0.25, 1.5)
    # Round 1: client 0: 0.25 + 1 − 2 = −0.75 → w₁ = 0.625, b = 1.375; client 1: 1.5 + 2 − 4 = −0.5 → w₂ = 1.75,
    #   b = 2.25; shared ((0.625 + 3·0.25)/4, (1.5 + 3·1.75)/4) = (0.34375, 1.6875)
    made = fit(tmp_path, WithBias(), algorithm=FedPer(personal=BIAS), max_rounds=2)
    assert global_weight(made) == [0.34375, 1.6875]
    assert [client_state(made, client) for client in (0, 1)] == [{"network.bias": [1.375]}, {"network.bias": [2.25]}]
    # Each client's own model: ½·(0.34375 + 1.375 − 2)² and ½·(1.6875 + 2.25 − 4)²; nothing is global.
    assert made.metrics["clients/loss_mean"] == pytest.approx((0.28125**2 + 0.0625**2) / 4)
    assert "global/loss" not in made.metrics
    # Two float32 of three travel, to and from two clients.
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (16, 16)


def test_fedrep_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: client 0: b = 1, then residual −1 → w₁ = 0.5; client 1: b = 2, then −2 → w₂ = 1; shared (0.125, 0.75)
    # Round 1: client 0: 0.125 + 1 − 2 → b = 1.4375, then −0.4375 → w₁ = 0.34375; client 1: 0.75 + 2 − 4 → b = 2.625,
    #   then −0.625 → w₂ = 1.0625; shared ((0.34375 + 3·0.125)/4, (0.75 + 3·1.0625)/4) = (0.1796875, 0.984375)
    made = fit(tmp_path, WithBias(), algorithm=FedRep(personal=BIAS), max_rounds=2)
    assert global_weight(made) == [0.1796875, 0.984375]
    assert [client_state(made, client) for client in (0, 1)] == [{"network.bias": [1.4375]}, {"network.bias": [2.625]}]


def test_fedper_without_personal_names_is_fedavg(tmp_path: Path) -> None:
    fedper = run_quickstart(tmp_path / "fedper", "--algorithm", "FedPer", "--algorithm.personal", "[]")
    assert_same(saved_weights(fedper), saved_weights(run_quickstart(tmp_path / "fedavg")))


def small() -> Model:
    return Model(Classifier("mlp", input_shape=(4,), in_channels=1))


def test_fedper_keeps_the_head_by_default(tmp_path: Path) -> None:
    split = FedPer().split(small(), 0)
    assert split.personal == ("network.head.weight", "network.head.bias")
    assert split.shared == ("network.body.1.weight", "network.body.1.bias")
    named = FedPer(head="network.body").split(small(), 0)
    assert (named.shared, named.personal) == (split.personal, split.shared)
    with pytest.raises(ConfigError, match=r"algorithm FedPer needs a last layer: name it as algorithm\.head"):
        fit(tmp_path, WithBias(), algorithm=FedPer())


@pytest.mark.parametrize("method", [FedPer, FedRep, LGFedAvg])
def test_a_network_that_is_a_head_alone_is_refused(tmp_path: Path, method: Any) -> None:
    # FedPer and FedRep would be LocalOnly, and LG-FedAvg FedAvg.
    task = Classifier("logistic", input_shape=(1, 8, 8))
    needs = f"{method.__name__} needs parameters that train below the head: choose a network with hidden layers"
    with pytest.raises(ConfigError, match=needs):
        fit(tmp_path, task, Digits(num_clients=2, max_train_samples=40), method())


@pytest.mark.parametrize("method", [FedPer, FedRep, LGFedAvg, FedBABU])
def test_a_head_without_parameters_is_refused(tmp_path: Path, method: Any) -> None:
    task = Classifier("mlp", input_shape=(1, 8, 8))
    flat = next(name for name, one in task.named_modules() if isinstance(one, nn.Flatten))
    with pytest.raises(ConfigError, match="does not train, and the method would do nothing to it: Flatten has no para"):
        fit(tmp_path, task, Digits(num_clients=2, max_train_samples=40), method(head=flat))


def test_fedper_takes_names_modules_and_patterns() -> None:
    split = FedPer(personal=["network.body", "network.head.bias"]).split(small(), 0)
    assert split.shared == ("network.head.weight",)
    named = FedPer(personal=["*.bias"]).split(small(), 0)
    assert set(named.personal) == {"network.body.1.bias", "network.head.bias"}
    with pytest.raises(ConfigError, match=r"personal is 'network\.hea', and no .* did you mean network\.head"):
        FedPer(personal=["network.hea"]).split(small(), 0)


def test_lg_fedavg_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: client 0: residual −2 → w₁ = b = 1; client 1: −4 → w₂ = b = 2; shared b = (1 + 3·2)/4 = 1.75
    # Round 1: client 0: 1 + 1.75 − 2 = 0.75 → w₁ = 0.625, b = 1.375; client 1: 2 + 1.75 − 4 = −0.25 → w₂ = 2.125,
    #   b = 1.875; shared b = (1.375 + 3·1.875)/4 = 1.75
    made = fit(tmp_path, WithBias(), algorithm=LGFedAvg(shared=BIAS), max_rounds=2)
    assert weights(made)["network.bias"].tolist() == [1.75]
    assert client_state(made, 0) == {"network.weight": [[0.625, 0.0]]}
    assert client_state(made, 1) == {"network.weight": [[0.0, 2.125]]}
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (8, 8)


def test_lg_fedavg_is_the_reverse_of_fedper(tmp_path: Path) -> None:
    split, reverse = LGFedAvg().split(small(), 0), FedPer().split(small(), 0)
    assert (split.shared, split.personal) == (reverse.personal, reverse.shared)
    named = LGFedAvg(shared=["network.body", "network.head.bias"]).split(small(), 0)
    assert named.personal == ("network.head.weight",)
    lg = run_quickstart(tmp_path / "lg", "--algorithm", "LGFedAvg", "--algorithm.shared", "[network.body]")
    fedper = run_quickstart(tmp_path / "fedper", "--algorithm", "FedPer")
    assert_same(saved_weights(lg), saved_weights(fedper))
    whole = run_quickstart(tmp_path / "whole", "--algorithm", "LGFedAvg", "--algorithm.shared", "[network]")
    assert_same(saved_weights(whole), saved_weights(run_quickstart(tmp_path / "fedavg")))
    with pytest.raises(ConfigError, match=r"algorithm\.shared is 'network\.hea', and no .* did you mean network\.head"):
        LGFedAvg(shared=["network.hea"]).split(small(), 0)


def test_lg_fedavgs_bodies_keep_their_batch_norm() -> None:
    model = Model(Classifier("test_resnet", input_shape=(1, 8, 8)))
    model.divide(LGFedAvg().split(model, 0))
    assert {name.rpartition(".")[0] for name in model.shared_names()} == {"network.fc"}
    assert set(model.personal_names) == {name for name in model.names if not name.startswith("network.fc.")}


def test_ditto_two_rounds_by_hand(tmp_path: Path) -> None:
    # The global model is FedAvg's: (0.25, 1.5) after round 0, (0.46875, 2.4375) after round 1 (test_fedavg.py).
    # λ = 1. Round 0, w_g = 0: v₀ = 0 − ½·(−2, 0) = (1, 0), v₁ = (0, 2)
    # Round 1: client 0: ((1 − 2) + (1 − 0.25), 0 − 1.5) = (−0.25, −1.5) → v₀ = (1.125, 0.75)
    #          client 1: (0 − 0.25, (2 − 4) + (2 − 1.5)) = (−0.25, −1.5) → v₁ = (0.125, 2.75)
    made = fit(tmp_path, algorithm=Ditto(lam=1.0), max_rounds=2)
    assert global_weight(made) == [0.46875, 2.4375]
    assert [client_state(made, client) for client in (0, 1)] == [
        {"state/own.network.weight": [[1.125, 0.75]]},
        {"state/own.network.weight": [[0.125, 2.75]]},
    ]
    # Clients are tested with their own models, ½·0.875² and ½·1.25²; the global one on the pooled set.
    assert made.metrics["clients/loss_mean"] == pytest.approx((0.3828125 + 0.78125) / 2)
    assert made.metrics["global/loss"] == pytest.approx((0.5 * 1.53125**2 + 3 * 0.5 * 1.5625**2) / 4)


def test_dittos_global_model_is_fedavgs(tmp_path: Path) -> None:
    ditto = run_quickstart(tmp_path / "ditto", "--algorithm", "Ditto")
    assert_same(saved_weights(ditto), saved_weights(run_quickstart(tmp_path / "fedavg")))


def test_ditto_fine_tunes_the_own_model(tmp_path: Path) -> None:
    # After round 0 with λ = 0: v₀ = (1, 0), v₁ = (0, 2); one step each: (1.5, 0), (0, 3): ½·0.25 and ½·1.
    made = fit(tmp_path, algorithm=Ditto(lam=0.0), max_rounds=1, protocols=[PersonalTest()])
    assert made.metrics["personal/loss_mean"] == pytest.approx((0.125 + 0.5) / 2)


def test_a_regularizer_goes_over_both_of_dittos_models(tmp_path: Path) -> None:
    # ½·2·‖w − w_g‖² has no gradient in the first step, from w_g = 0. In the second, client 0: global w₁ = 1, gradient
    # (1 − 2) + 2·1 = 1 → 0.5; own v = 1 likewise → 0.5 with λ = 0. Client 1: 2, (2 − 4) + 2·2 = 2 → 1, twice that.
    made = fit(tmp_path, algorithm=Ditto(lam=0.0, regularizer=Prox(2.0)), max_rounds=1, local_epochs=2)
    assert global_weight(made) == [0.125, 0.75]
    assert client_state(made, 0) == {"state/own.network.weight": [[0.5, 0.0]]}


@pytest.mark.parametrize(
    ("first_order", "expected"),
    [
        # α = ½. Client 0: ahead 0 − ½·(−2) = 1, gradient 1 − 2 → w₁ = ½; client 1: ahead 2, gradient −2 → w₂ = 1;
        # mean (0.125, 0.75). Then client 0: ahead 0.125 + ½·1.875 = 1.0625, gradient −0.9375 → 0.59375; client 1: ahead
        # 0.75 + ½·3.25 = 2.375, gradient −1.625 → 1.5625; mean ((0.59375 + 0.375)/4, (0.75 + 4.6875)/4).
        (True, [0.2421875, 1.359375]),
        # Times 1 − α·∇²f = ½: w₁ = 0.25, w₂ = 0.5; mean (0.0625, 0.375). Then ahead 1.03125, gradient −0.96875/2 →
        # 0.3046875; ahead 2.1875, gradient −1.8125/2 → 0.828125; mean ((0.3046875 + 0.1875)/4, (0.375 + 2.484375)/4).
        (False, [0.123046875, 0.71484375]),
    ],
)
def test_per_fedavg_two_rounds_by_hand(tmp_path: Path, first_order: bool, expected: list[float]) -> None:
    made = fit(tmp_path, algorithm=PerFedAvg(alpha=0.5, first_order=first_order), max_rounds=2)
    assert global_weight(made) == expected


def test_per_fedavg_uses_the_second_half(tmp_path: Path) -> None:
    # Without a look ahead, a step on the second half of the batch: samples 2 and 3 of 4 (an odd one goes to the first).
    module: Any = objective_of(LeastSquares(), PerFedAvg(alpha=0.0))
    x = torch.tensor([[1.0, 0.0]] * 2 + [[0.0, 1.0]] * 2)
    loss = module.training_step((x, torch.tensor([2, 2, 4, 4])), 0)
    assert torch.autograd.grad(loss, module.network.weight)[0].tolist() == [[0.0, -4.0]]


def test_per_fedavg_on_identical_samples_without_look_ahead_is_fedavg(tmp_path: Path) -> None:
    meta = fit(tmp_path, algorithm=PerFedAvg(alpha=0.0), max_rounds=2)
    assert global_weight(meta) == [0.46875, 2.4375]


def test_per_fedavg_fine_tunes_plainly(tmp_path: Path) -> None:
    # From (0.125, 0.75): client 0: 0.125 + ½·1.875 = 1.0625, ½·0.9375²; client 1: 2.375, ½·1.625².
    made = fit(tmp_path, algorithm=PerFedAvg(alpha=0.5), max_rounds=1, protocols=[PersonalTest(lr=0.5)])
    assert made.metrics["personal/loss_mean"] == pytest.approx((0.5 * 0.9375**2 + 0.5 * 1.625**2) / 2)


def test_local_only_two_rounds_by_hand(tmp_path: Path) -> None:
    # Client 0: 0 → 1 → 1.5, ½·0.25; client 1: 0 → 2 → 3, ½·1. Nothing travels, nothing is global.
    made = fit(tmp_path, algorithm=LocalOnly(), max_rounds=2, protocols=[GlobalTest(), ClientTest()])
    assert made.metrics["clients/loss_mean"] == pytest.approx((0.125 + 0.5) / 2)
    assert made.metrics["comm/total_bytes"] == 0
    assert made.metrics["participation/count"] == 2
    assert "global/loss" not in made.metrics
    assert weights(made) == {}


def test_local_only_keeps_batch_norm_to_itself(tmp_path: Path) -> None:
    run = run_quickstart(tmp_path, "--algorithm", "LocalOnly", "--model.network", "test_resnet", rounds=1)
    kept = next(iter(client_states(run).values()))
    assert kept["network.bn1.running_mean"].any()
    assert saved_weights(run) == {}


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.body_epochs is 0"):
        FedRep(body_epochs=0)
    with pytest.raises(ConfigError, match=r"algorithm\.lam is -1"):
        Ditto(lam=-1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.own_epochs is 0"):
        Ditto(own_epochs=0)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is -1"):
        PerFedAvg(alpha=-1.0)


def test_a_batch_of_one_sample_serves_twice(tmp_path: Path) -> None:
    made = fit(tmp_path, data=Points(1), algorithm=PerFedAvg(alpha=0.5), max_rounds=1)
    assert global_weight(made) == [0.5, 0.0]


def test_per_fedavg_refuses_cut_batches() -> None:
    with pytest.raises(ConfigError, match="algorithm PerFedAvg needs whole batches, which strategy=ddp would cut"):
        check_optimization(LeastSquares(), PerFedAvg(), data_parallel=True, gradients=GradientOptions())


class Nested(LeastSquares):
    """Takes its batches apart itself; leaves a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(1))

    def loss(self, batch: Any) -> Any:
        return super().loss((batch["in"]["x"], batch["y"][0]))


def test_per_fedavg_halves_batches_of_any_nesting() -> None:
    module: Any = objective_of(Nested(), PerFedAvg(alpha=0.5))
    x, y = torch.tensor([[1.0, 0.0]] * 2 + [[0.0, 1.0]] * 3)[[0, 2, 1, 3, 4]], torch.tensor([2, 4, 2, 4, 4])
    # The first three samples, with residuals −2, −4, −2: gradient −(4, 4)/3; ahead w = (2, 2)/3. The last two: w₂ − 4.
    loss = module.training_step({"in": {"x": x}, "y": (y, "a name")}, 0)
    assert loss.item() == pytest.approx(0.5 * (2 / 3 - 4) ** 2)
    loss.backward()
    assert module.network.weight.grad[0].tolist() == pytest.approx([0.0, 2 / 3 - 4])
    assert module.unused.grad is None


def test_per_fedavg_takes_a_regularizer_ahead(tmp_path: Path) -> None:
    # LD is the mean squared distance of the outputs; client 0, one sample, α = ½: ahead 0 − ½·(−2) = 1, where it is
    # (1 − 0)² with gradient 2; gradient (1 − 2) + 2 = 1 → w₁ = −½.
    made = fit(tmp_path, data=Points(1), algorithm=PerFedAvg(alpha=0.5, regularizer=LD(), head="network"), max_rounds=1)
    assert made.metrics["train/ld"] == 1.0
    assert global_weight(made) == [-0.5, 0.0]


def test_per_fedavg_takes_a_regularizer_of_weights_ahead(tmp_path: Path) -> None:
    # ½·2·‖w‖² of w ahead, α = ½, client 0: ahead 0 − ½·(−2) = 1, gradient (1 − 2) + 2·1 = 1 → w₁ = −½.
    made = fit(tmp_path, data=Points(1), algorithm=PerFedAvg(alpha=0.5, regularizer=Prox(2.0)), max_rounds=1)
    assert made.metrics["train/prox"] == 1.0
    assert global_weight(made) == [-0.5, 0.0]


def test_fedrep_refuses_a_module_that_optimises_by_hand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ByHand optimises by hand, and algorithm FedRep needs a loss"):
        fit(tmp_path, ByHand(), algorithm=FedRep(personal=BIAS))


@pytest.mark.parametrize("make", [lambda: FedPer(personal=BIAS), LocalOnly])
def test_modules_that_optimise_by_hand_keep_a_part(tmp_path: Path, make: Any) -> None:
    by_hand, automatic = (fit(tmp_path, module, algorithm=make(), max_rounds=3) for module in (ByHand(2), Automatic()))
    assert client_state(by_hand, 1) == client_state(automatic, 1)
    assert client_state(by_hand, 1)["network.bias"] != [0.0]
    assert_same(weights(by_hand), weights(automatic))
