"""FedPer, FedRep, Ditto, Per-FedAvg and local training against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has three samples x = (0, 1), y = 4; learning rate ½.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed.errors import ConfigError
from lit_fed.methods import Ditto, FedPer, FedRep, LocalOnly, PerFedAvg
from lit_fed.optimization import check_optimization
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.methods.support import client_state, global_weight, run_quickstart
from tests.support import LeastSquares, Points, assert_same, fit, saved_weights, weights


class WithBias(LeastSquares):
    """f(x) = w·x + b from 0."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = nn.Linear(2, 1)
        nn.init.zeros_(self.network.weight)
        nn.init.zeros_(self.network.bias)


class PerLeastSquares(FedPer, WithBias):
    """The bias stays."""

    def split(self, round_idx: int) -> Any:
        self.personal = ["network.bias"]
        return super().split(round_idx)


class RepLeastSquares(FedRep, WithBias):
    """The bias is the head."""

    def split(self, round_idx: int) -> Any:
        self.personal = ["network.bias"]
        return super().split(round_idx)


class DittoLeastSquares(Ditto, LeastSquares):
    """Two models."""


class MetaLeastSquares(PerFedAvg, LeastSquares):
    """Looks ahead."""


class LonelyLeastSquares(LocalOnly, LeastSquares):
    """Alone."""


def test_fedper_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: client 0: residual −2 → w₁ = b = 1; client 1: −4 → w₂ = b = 2; shared (1/4, 3·2/4) = (0.25, 1.5)
    # Round 1: client 0: 0.25 + 1 − 2 = −0.75 → w₁ = 0.625, b = 1.375; client 1: 1.5 + 2 − 4 = −0.5 → w₂ = 1.75,
    #   b = 2.25; shared ((0.625 + 3·0.25)/4, (1.5 + 3·1.75)/4) = (0.34375, 1.6875)
    made = fit(tmp_path, PerLeastSquares(), max_rounds=2)
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
    made = fit(tmp_path, RepLeastSquares(), max_rounds=2)
    assert global_weight(made) == [0.1796875, 0.984375]
    assert [client_state(made, client) for client in (0, 1)] == [{"network.bias": [1.4375]}, {"network.bias": [2.625]}]


def test_fedper_without_personal_names_is_fedavg(tmp_path: Path) -> None:
    fedper = run_quickstart(tmp_path / "fedper", "--model", "FedPer", "--model.personal", "[]")
    assert_same(saved_weights(fedper), saved_weights(run_quickstart(tmp_path / "fedavg")))


def test_fedper_keeps_the_last_layer_by_default() -> None:
    split = FedPer(network="mlp", input_shape=(4,), in_channels=1).split(0)
    assert split.personal == ("network.head.weight", "network.head.bias")
    assert split.shared == ("network.body.1.weight", "network.body.1.bias")


def test_fedper_unknown_name() -> None:
    FedPer(network="mlp", input_shape=(4,), personal=["network.body", "network.head.bias"])
    with pytest.raises(ConfigError, match=r"model\.personal names 'network\.hea', but the parameters are"):
        FedPer(network="mlp", input_shape=(4,), personal=["network.hea"])


def test_ditto_two_rounds_by_hand(tmp_path: Path) -> None:
    # The global model is FedAvg's: (0.25, 1.5) after round 0, (0.46875, 2.4375) after round 1 (test_fedavg.py).
    # λ = 1. Round 0, w_g = 0: v₀ = 0 − ½·(−2, 0) = (1, 0), v₁ = (0, 2)
    # Round 1: client 0: ((1 − 2) + (1 − 0.25), 0 − 1.5) = (−0.25, −1.5) → v₀ = (1.125, 0.75)
    #          client 1: (0 − 0.25, (2 − 4) + (2 − 1.5)) = (−0.25, −1.5) → v₁ = (0.125, 2.75)
    made = fit(tmp_path, DittoLeastSquares(lam=1.0), max_rounds=2)
    assert global_weight(made) == [0.46875, 2.4375]
    assert [client_state(made, client) for client in (0, 1)] == [
        {"own.network.weight": [[1.125, 0.75]]},
        {"own.network.weight": [[0.125, 2.75]]},
    ]
    # Clients are tested with their own models, ½·0.875² and ½·1.25²; the global one on the pooled set.
    assert made.metrics["clients/loss_mean"] == pytest.approx((0.3828125 + 0.78125) / 2)
    assert made.metrics["global/loss"] == pytest.approx((0.5 * 1.53125**2 + 3 * 0.5 * 1.5625**2) / 4)


def test_dittos_global_model_is_fedavgs(tmp_path: Path) -> None:
    ditto = run_quickstart(tmp_path / "ditto", "--model", "Ditto")
    assert_same(saved_weights(ditto), saved_weights(run_quickstart(tmp_path / "fedavg")))


def test_ditto_fine_tunes_the_own_model(tmp_path: Path) -> None:
    # After round 0 with λ = 0: v₀ = (1, 0), v₁ = (0, 2); one step each: (1.5, 0), (0, 3): ½·0.25 and ½·1.
    made = fit(tmp_path, DittoLeastSquares(lam=0.0), max_rounds=1, protocols=[PersonalTest()])
    assert made.metrics["personal/loss_mean"] == pytest.approx((0.125 + 0.5) / 2)


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
    made = fit(tmp_path, MetaLeastSquares(alpha=0.5, first_order=first_order), max_rounds=2)
    assert global_weight(made) == expected


def test_per_fedavg_uses_the_second_half(tmp_path: Path) -> None:
    # Without a look ahead, a step on the second half of the batch: samples 2 and 3 of 4 (an odd one goes to the first).
    module = MetaLeastSquares(alpha=0.0)
    x = torch.tensor([[1.0, 0.0]] * 2 + [[0.0, 1.0]] * 2)
    loss = module.training_step((x, torch.tensor([2, 2, 4, 4])), 0)
    assert torch.autograd.grad(loss, module.network.weight)[0].tolist() == [[0.0, -4.0]]


def test_per_fedavg_on_identical_samples_without_look_ahead_is_fedavg(tmp_path: Path) -> None:
    meta = fit(tmp_path, MetaLeastSquares(alpha=0.0), max_rounds=2)
    assert global_weight(meta) == [0.46875, 2.4375]


def test_per_fedavg_fine_tunes_plainly(tmp_path: Path) -> None:
    # From (0.125, 0.75): client 0: 0.125 + ½·1.875 = 1.0625, ½·0.9375²; client 1: 2.375, ½·1.625².
    made = fit(tmp_path, MetaLeastSquares(alpha=0.5), max_rounds=1, protocols=[PersonalTest(lr=0.5)])
    assert made.metrics["personal/loss_mean"] == pytest.approx((0.5 * 0.9375**2 + 0.5 * 1.625**2) / 2)


def test_local_only_two_rounds_by_hand(tmp_path: Path) -> None:
    # Client 0: 0 → 1 → 1.5, ½·0.25; client 1: 0 → 2 → 3, ½·1. Nothing travels, nothing is global.
    made = fit(tmp_path, LonelyLeastSquares(), max_rounds=2, protocols=[GlobalTest(), ClientTest()])
    assert made.metrics["clients/loss_mean"] == pytest.approx((0.125 + 0.5) / 2)
    assert made.metrics["comm/total_bytes"] == 0
    assert made.metrics["participation/count"] == 2
    assert "global/loss" not in made.metrics
    assert weights(made)["network.weight"].tolist() == [[0.0, 0.0]]


def test_local_only_keeps_batch_norm_to_itself(tmp_path: Path) -> None:
    run = run_quickstart(tmp_path, "--model", "LocalOnly", "--model.network", "test_resnet", rounds=1)
    kept = torch.load(next((run / "checkpoints/clients").glob("*.pt")), weights_only=True)
    assert any("running_mean" in name for name in kept)
    assert not (saved_weights(run)["network.bn1.running_mean"]).any()


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"model\.body_epochs is 0"):
        FedRep(network="mlp", input_shape=(4,), body_epochs=0)
    with pytest.raises(ConfigError, match=r"model\.lam is -1"):
        Ditto(lam=-1.0)
    with pytest.raises(ConfigError, match=r"model\.own_epochs is 0"):
        Ditto(own_epochs=0)
    with pytest.raises(ConfigError, match=r"model\.alpha is -1"):
        PerFedAvg(alpha=-1.0)


def test_a_batch_of_one_sample_serves_twice(tmp_path: Path) -> None:
    made = fit(tmp_path, MetaLeastSquares(alpha=0.5), Points(1), max_rounds=1)
    assert global_weight(made) == [0.5, 0.0]


def test_per_fedavg_refuses_cut_batches() -> None:
    with pytest.raises(ConfigError, match="MetaLeastSquares needs whole batches, which strategy=ddp would cut"):
        check_optimization(MetaLeastSquares(), data_parallel=True)
