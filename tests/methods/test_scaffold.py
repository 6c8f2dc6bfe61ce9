"""SCAFFOLD against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has x = (0, 1), y = 4; learning rate ½, two steps a round.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed import FederatedTrainer
from lit_fed.engine.lightning.meter import WeightedSums
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.protocols import PersonalTest
from tests.methods.support import Automatic, ByHand, Momentum, Rota, client_state, global_weight, run_quickstart
from tests.support import LeastSquares, Points, assert_same, fit, rows, saved_weights, weights


def run(folder: Path, rounds: int, algorithm: Scaffold | None = None, **kwargs: Any) -> FederatedTrainer:
    """Two corrected steps a round."""
    return fit(folder, algorithm=algorithm or Scaffold(), max_rounds=rounds, **({"local_epochs": 2} | kwargs))


def control(made: Any) -> list[float]:
    weight: list[float] = made.run.federation.server["control"]["network.weight"].flatten().tolist()
    return weight


def test_two_rounds_by_hand_option_2(tmp_path: Path) -> None:
    # Round 0, all control variates 0:
    #   client 0: w₁ = 0 → 1 → 1.5;  c₀⁺ = (0 − 1.5)/(2·½) = −1.5 → (−1.5, 0)
    #   client 1: w₂ = 0 → 2 → 3;    c₁⁺ = (0, −3)
    #   w = (0.75, 1.5), c = ½·((−1.5, 0) + (0, −3)) = (−0.75, −1.5)
    # Round 1:
    #   client 0: c − c₀ = (0.75, −1.5)
    #     step 1: (0.75 − 2, 0) + (0.75, −1.5) = (−0.5, −1.5) → w = (1, 2.25)
    #     step 2: (1 − 2, 0) + (0.75, −1.5) = (−0.25, −1.5) → w = (1.125, 3)
    #     c₀⁺ = the mean of its own gradients (−1.25, 0) and (−1, 0) = (−1.125, 0)
    #   client 1: c − c₁ = (−0.75, 1.5)
    #     step 1: (0, 1.5 − 4) + (−0.75, 1.5) = (−0.75, −1) → w = (1.125, 2)
    #     step 2: (0, 2 − 4) + (−0.75, 1.5) = (−0.75, −0.5) → w = (1.5, 2.25);  c₁⁺ = (0, −2.25)
    #   w = (1.3125, 2.625), c = (−0.5625, −1.125)
    made = run(tmp_path, 2)
    assert global_weight(made) == [1.3125, 2.625]
    assert control(made) == [-0.5625, -1.125]
    assert client_state(made, 0) == {"state/control.network.weight": [[-1.125, 0.0]]}
    assert client_state(made, 1) == {"state/control.network.weight": [[0.0, -2.25]]}


def test_two_rounds_by_hand_option_1(tmp_path: Path) -> None:
    # Round 0: c₀⁺ and c₁⁺ are the gradients at 0, (−2, 0) and (0, −4); c = (−1, −2); w = (0.75, 1.5) as above.
    # Round 1:
    #   client 0: c − c₀ = (1, −2): (−1.25 + 1, −2) → w = (0.875, 2.5); (−1.125 + 1, −2) → w = (0.9375, 3.5)
    #   client 1: c − c₁ = (−1, 2): (−1, −2.5 + 2) → w = (1.25, 1.75); (−1, −2.25 + 2) → w = (1.75, 1.875)
    #   w = (1.34375, 2.6875); c₀⁺ = (0.75 − 2, 0), c₁⁺ = (0, 1.5 − 4), c = (−0.625, −1.25)
    made = run(tmp_path, 2, Scaffold(option=1))
    assert global_weight(made) == [1.34375, 2.6875]
    assert control(made) == [-0.625, -1.25]
    assert client_state(made, 0) == {"state/control.network.weight": [[-1.25, 0.0]]}


def test_partial_participation_by_hand(tmp_path: Path) -> None:
    # Round 0, client 0 alone: w = (1.5, 0), c₀⁺ = (−1.5, 0), c = ½·(−1.5, 0) = (−0.75, 0), since N = 2.
    # Round 1, client 1 alone, its first time: c − c₁ = (−0.75, 0)
    #   step 1: (0, −4) + (−0.75, 0) → w = (1.875, 2); step 2: (0, −2) + (−0.75, 0) → w = (2.25, 3)
    #   c₁⁺ = (0, −3), c = (−0.75, 0) + ½·(0, −3) = (−0.75, −1.5)
    made = run(tmp_path, 2, participation=Rota())
    assert global_weight(made) == [2.25, 3.0]
    assert control(made) == [-0.75, -1.5]


def test_momentum_by_hand(tmp_path: Path) -> None:
    # ρ = ½. Client 0: v = −2 → w₁ = 1; v = ½·(−2) + (1 − 2) = −2 → w₁ = 2. K̃ = 1 + 1.5 = 2.5, so
    # c₀⁺ = (0 − 2)/(2.5·½) = −1.6: the mean of its gradients −2 and −1 with weights 1.5 and 1. Client 1 twice that.
    made = run(tmp_path, 1, module=Momentum(0.5))
    assert client_state(made, 0)["state/control.network.weight"][0] == pytest.approx([-1.6, 0.0])
    assert client_state(made, 1)["state/control.network.weight"][0] == pytest.approx([0.0, -3.2])


def test_server_lr_and_weighting_by_hand(tmp_path: Path) -> None:
    # From 0 with weights 1 and 3 the mean is (1.5/4, 3·3/4) = (0.375, 2.25); half of the way is taken. The control
    # variate's mean stays uniform.
    made = run(tmp_path, 1, Scaffold(weighting="samples", server_lr=0.5))
    assert global_weight(made) == [0.1875, 1.125]
    assert control(made) == [-0.75, -1.5]


def test_one_client_is_fedavg(tmp_path: Path) -> None:
    # With one client c − c_i = 0 in every round.
    one = run(tmp_path, 3, data=Points(1))
    other = fit(tmp_path, data=Points(1), algorithm=FedAvg(), max_rounds=3, local_epochs=2)
    assert global_weight(one) == pytest.approx(global_weight(other), abs=1e-6)


def test_bytes_are_exactly_twice_fedavgs(tmp_path: Path) -> None:
    scaffold = run(tmp_path, 1).metrics
    fedavg = fit(tmp_path, max_rounds=1).metrics
    for name in ("comm/uplink_bytes", "comm/downlink_bytes"):
        assert scaffold[name] == 2 * fedavg[name] == 32


def test_option_1_weighs_batches_by_their_size() -> None:
    # (2·1 + 1·4)/3 = 2
    sums = WeightedSums()
    for samples, value in ((2, 1.0), (1, 4.0)):
        sums.add("w", torch.tensor([value]), samples)
    assert (sums.totals["w"] / sums.weights["w"]).tolist() == [2.0]


class LastLayer(LeastSquares):
    """f(x) = w·x + b from w = (1, 1), b = 0, all of it the last layer; weight decay ½."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 1)
        nn.init.ones_(self.network.weight)
        nn.init.zeros_(self.network.bias)

    @property
    def head(self) -> nn.Module:
        return self.network

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, weight_decay=0.5)


def test_freeze_head_by_hand(tmp_path: Path) -> None:
    # As FedDr+'s code ran it: only the last layer's weight has its gradient zeroed, and before the correction.
    # Round 0, client 0 alone, x = (1, 0), y = 2, no correction yet: the residual is 1 + 0 − 2 = −1.
    #   w: 0 and the decay ½·(1, 1): (1, 1) − ½·(½, ½) = (¾, ¾);  b: −1 and no decay of 0: 0 + ½ = ½
    #   c₀⁺ = (w_g − w)/½: (½, ½) for w, −1 for b;  c is half of it: (¼, ¼) and −½, since N = 2.
    # Round 1, client 1 alone, x = (0, 1), y = 4, c − c₁ = c: the residual is ¾ + ½ − 4 = −2.75.
    #   w: 0 + (¼, ¼) + ½·(¾, ¾) = (⅝, ⅝): (¾, ¾) − ½·(⅝, ⅝) = (0.4375, 0.4375)
    #   b: −2.75 − ½ + ½·½ = −3: ½ + 1.5 = 2
    #   c₁⁺ = −c + (w_g − w)/½: −¼ + 0.625 = 0.375 for w, ½ + (½ − 2)/½ = −2.5 for b
    made = run(tmp_path, 2, Scaffold(freeze_head=True), module=LastLayer(), participation=Rota(), local_epochs=1)
    assert {name: tensor.flatten().tolist() for name, tensor in weights(made).items()} == {
        "network.weight": [0.4375, 0.4375],
        "network.bias": [2.0],
    }
    assert client_state(made, 1) == {
        "state/control.network.weight": [[0.375, 0.375]],
        "state/control.network.bias": [-2.5],
    }


def test_freeze_head_of_option_1_has_no_gradient_of_the_weight_to_keep(tmp_path: Path) -> None:
    # Client 0's gradient at the first model is (−1, 0) in w, which is zeroed, and −1 in b.
    made = run(tmp_path, 1, Scaffold(option=1, freeze_head=True), module=LastLayer(), participation=Rota())
    assert client_state(made, 0) == {
        "state/control.network.weight": [[0.0, 0.0]],
        "state/control.network.bias": [-1.0],
    }


@pytest.mark.parametrize("frozen", [True, False])
def test_freeze_head(tmp_path: Path, frozen: bool) -> None:
    options = ["--algorithm", "Scaffold", "--algorithm.freeze_head", str(frozen).lower()]
    start, end = (saved_weights(run_quickstart(tmp_path / str(n), *options, rounds=n)) for n in (1, 3))
    # No decay in the quickstart, so that nothing moves the weight.
    assert torch.equal(start["network.head.weight"], end["network.head.weight"]) is frozen
    assert not torch.equal(start["network.head.bias"], end["network.head.bias"])
    assert not torch.equal(start["network.body.1.weight"], end["network.body.1.weight"])


def test_fine_tuning_is_not_corrected(tmp_path: Path) -> None:
    # PersonalTest on the model after round 0, w = (0.75, 1.5): plain steps, as FedAvg's client would make them:
    # client 0: 0.75 → 1.375, loss ½·0.625² = 0.1953125; client 1: 1.5 → 2.75, loss ½·1.25² = 0.78125.
    metrics = run(tmp_path, 1, protocols=[PersonalTest(epochs=1)]).metrics
    assert metrics["personal/loss_mean"] == pytest.approx((0.1953125 + 0.78125) / 2)


class Adaptive(Automatic):
    """`Automatic` with Adam."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class AdaptiveByHand(ByHand):
    """`ByHand` with Adam."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("module", "option", "name"), [(Automatic, 2, "SGD"), (Adaptive, 1, "Adam")])
def test_the_optimizer_chooses_the_option_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: Any, option: Any, name: str
) -> None:
    chosen = run(tmp_path, 3, Scaffold(), module=module())
    line = f"algorithm.option is null: Scaffold uses option {option} under {name}\n"
    assert line in capsys.readouterr().out
    given = run(tmp_path, 3, Scaffold(option=option), module=module())
    assert_same(weights(chosen), weights(given))
    assert control(chosen) == control(given)
    assert "algorithm.option" not in capsys.readouterr().out


def test_the_path_under_an_adaptive_optimizer_is_refused(tmp_path: Path) -> None:
    line = (
        r"algorithm\.option is 2, which measures steps of torch\.optim\.SGD, and model Adaptive has Adam; "
        "set it to None or 1"
    )
    with pytest.raises(ConfigError, match=line):
        run(tmp_path, 1, Scaffold(option=2), module=Adaptive())
    with pytest.raises(ConfigError, match="AdaptiveByHand optimises by hand with Adam, and algorithm Scaffold needs a"):
        run(tmp_path, 1, Scaffold(), module=AdaptiveByHand())


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.option is 3"):
        Scaffold(option=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm\.server_lr is 0"):
        Scaffold(server_lr=0)


def test_another_methods_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=1)
    with pytest.raises(CheckpointError, match=r"saved by FedAvg .* does not fit Scaffold .* 'control' here only"):
        run(tmp_path, 2, ckpt_path="last")


def test_modules_that_optimise_by_hand(tmp_path: Path) -> None:
    by_hand, automatic = (run(tmp_path, 3, module=module) for module in (ByHand(), Automatic()))
    assert_same(weights(by_hand), weights(automatic))
    assert any(client_state(by_hand, 0)["state/control.network.bias"]), "nothing was corrected"
    with pytest.raises(ConfigError, match="ByHand has 2 optimizers, and algorithm Scaffold needs a single optimizer"):
        run(tmp_path, 1, module=ByHand(2))
    with pytest.raises(ConfigError, match="ByHand optimises by hand, and algorithm Scaffold needs a loss"):
        run(tmp_path, 1, Scaffold(option=1), module=ByHand())


def test_layers_with_rates_of_their_own_are_refused(tmp_path: Path) -> None:
    class Layered(Automatic):
        def configure_optimizers(self) -> Any:
            weight, bias = self.parameters()
            return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.1}], lr=self.lr)

    line = "Layered has 2 learning rates, and algorithm Scaffold needs a single optimizer with one learning rate, whose"
    with pytest.raises(ConfigError, match=line):
        run(tmp_path, 1, module=Layered())


def test_runs_report_what_clients_send(tmp_path: Path) -> None:
    run = run_quickstart(tmp_path, "--algorithm", "Scaffold")
    assert all(
        float(row["comm/uplink_bytes"]) == float(row["comm/downlink_bytes"]) for row in rows(run / "metrics.csv")
    )
