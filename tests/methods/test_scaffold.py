"""SCAFFOLD against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has x = (0, 1), y = 4; learning rate ½, two steps a round.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import CheckpointError, ClientFailure, ConfigError
from lit_fed.methods import FedAvg, Scaffold, ScaffoldServer
from lit_fed.methods.scaffold import _MeanGradient
from tests.methods.support import Rota, client_state, global_weight, run_quickstart
from tests.support import LeastSquares, Points, fit, rows, saved_weights


class ScaffoldLeastSquares(Scaffold, LeastSquares):
    """Two corrected steps a round."""

    def __init__(self, momentum: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**({"local_epochs": 2} | kwargs))
        self.optimizer = lambda p: torch.optim.SGD(p, lr=0.5, momentum=momentum)


def control(made: Any) -> list[float]:
    weight: list[float] = made.federation.algorithm.control["network.weight"].flatten().tolist()
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
    made = fit(tmp_path, ScaffoldLeastSquares(), algorithm=ScaffoldServer(), max_rounds=2)
    assert global_weight(made) == [1.3125, 2.625]
    assert control(made) == [-0.5625, -1.125]
    assert client_state(made, 0) == {"control.network.weight": [[-1.125, 0.0]]}
    assert client_state(made, 1) == {"control.network.weight": [[0.0, -2.25]]}


def test_two_rounds_by_hand_option_1(tmp_path: Path) -> None:
    # Round 0: c₀⁺ and c₁⁺ are the gradients at 0, (−2, 0) and (0, −4); c = (−1, −2); w = (0.75, 1.5) as above.
    # Round 1:
    #   client 0: c − c₀ = (1, −2): (−1.25 + 1, −2) → w = (0.875, 2.5); (−1.125 + 1, −2) → w = (0.9375, 3.5)
    #   client 1: c − c₁ = (−1, 2): (−1, −2.5 + 2) → w = (1.25, 1.75); (−1, −2.25 + 2) → w = (1.75, 1.875)
    #   w = (1.34375, 2.6875); c₀⁺ = (0.75 − 2, 0), c₁⁺ = (0, 1.5 − 4), c = (−0.625, −1.25)
    made = fit(tmp_path, ScaffoldLeastSquares(option=1), algorithm=ScaffoldServer(), max_rounds=2)
    assert global_weight(made) == [1.34375, 2.6875]
    assert control(made) == [-0.625, -1.25]
    assert client_state(made, 0) == {"control.network.weight": [[-1.25, 0.0]]}


def test_partial_participation_by_hand(tmp_path: Path) -> None:
    # Round 0, client 0 alone: w = (1.5, 0), c₀⁺ = (−1.5, 0), c = ½·(−1.5, 0) = (−0.75, 0), since N = 2.
    # Round 1, client 1 alone, its first time: c − c₁ = (−0.75, 0)
    #   step 1: (0, −4) + (−0.75, 0) → w = (1.875, 2); step 2: (0, −2) + (−0.75, 0) → w = (2.25, 3)
    #   c₁⁺ = (0, −3), c = (−0.75, 0) + ½·(0, −3) = (−0.75, −1.5)
    made = fit(tmp_path, ScaffoldLeastSquares(), algorithm=ScaffoldServer(), max_rounds=2, participation=Rota())
    assert global_weight(made) == [2.25, 3.0]
    assert control(made) == [-0.75, -1.5]


def test_momentum_by_hand(tmp_path: Path) -> None:
    # ρ = ½. Client 0: v = −2 → w₁ = 1; v = ½·(−2) + (1 − 2) = −2 → w₁ = 2. K̃ = 1 + 1.5 = 2.5, so
    # c₀⁺ = (0 − 2)/(2.5·½) = −1.6: the mean of its gradients −2 and −1 with weights 1.5 and 1. Client 1 twice that.
    made = fit(tmp_path, ScaffoldLeastSquares(momentum=0.5), algorithm=ScaffoldServer(), max_rounds=1)
    assert client_state(made, 0)["control.network.weight"][0] == pytest.approx([-1.6, 0.0])
    assert client_state(made, 1)["control.network.weight"][0] == pytest.approx([0.0, -3.2])


def test_server_lr_and_weighting_by_hand(tmp_path: Path) -> None:
    # From 0 with weights 1 and 3 the mean is (1.5/4, 3·3/4) = (0.375, 2.25); half of the way is taken. The control
    # variate's mean stays uniform.
    server = ScaffoldServer(weighting="samples", server_lr=0.5)
    made = fit(tmp_path, ScaffoldLeastSquares(), algorithm=server, max_rounds=1)
    assert global_weight(made) == [0.1875, 1.125]
    assert control(made) == [-0.75, -1.5]


def test_one_client_is_fedavg(tmp_path: Path) -> None:
    # With one client c − c_i = 0 in every round.
    one = fit(tmp_path, ScaffoldLeastSquares(), Points(1), ScaffoldServer(), max_rounds=3)
    other = fit(tmp_path, LeastSquares(local_epochs=2), Points(1), FedAvg(), max_rounds=3)
    assert global_weight(one) == pytest.approx(global_weight(other), abs=1e-6)


def test_bytes_are_exactly_twice_fedavgs(tmp_path: Path) -> None:
    scaffold = fit(tmp_path, ScaffoldLeastSquares(), algorithm=ScaffoldServer(), max_rounds=1).metrics
    fedavg = fit(tmp_path, LeastSquares(), max_rounds=1).metrics
    for name in ("comm/uplink_bytes", "comm/downlink_bytes"):
        assert scaffold[name] == 2 * fedavg[name] == 32


def test_option_1_weighs_batches_by_their_size() -> None:
    # (2·1 + 1·4)/3 = 2
    gradient = _MeanGradient()
    for samples, value in ((2, 1.0), (1, 4.0)):
        gradient.pending += samples
        gradient.add({"w": torch.tensor([value])})
    assert gradient.mean("w", like=torch.zeros(1)).tolist() == [2.0]
    assert gradient.mean("b", like=torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("frozen", [True, False])
def test_freeze_head(tmp_path: Path, frozen: bool) -> None:
    options = ["--model", "Scaffold", "--algorithm", "ScaffoldServer", "--model.freeze_head", str(frozen).lower()]
    start, end = (saved_weights(run_quickstart(tmp_path / str(n), *options, rounds=n)) for n in (1, 3))
    assert torch.equal(start["network.head.weight"], end["network.head.weight"]) is frozen
    assert not torch.equal(start["network.body.1.weight"], end["network.body.1.weight"])


def test_fine_tuning_is_not_corrected(tmp_path: Path) -> None:
    # PersonalTest on the model after round 0, w = (0.75, 1.5): plain steps, as FedAvg's client would make them:
    # client 0: 0.75 → 1.375, loss ½·0.625² = 0.1953125; client 1: 1.5 → 2.75, loss ½·1.25² = 0.78125.
    options = {"protocols": [_personal()], "max_rounds": 1}
    metrics = fit(tmp_path, ScaffoldLeastSquares(), algorithm=ScaffoldServer(), **options).metrics
    assert metrics["personal/loss_mean"] == pytest.approx((0.1953125 + 0.78125) / 2)


def _personal() -> Any:
    from lit_fed.protocols import PersonalTest

    return PersonalTest(epochs=1)


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.option is 3"):
        Scaffold(option=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm\.server_lr is 0"):
        ScaffoldServer(server_lr=0)
    with pytest.raises(ConfigError, match="ScaffoldServer needs a model Scaffold; this one is LeastSquares"):
        fit(tmp_path, LeastSquares(), algorithm=ScaffoldServer())


def test_another_server(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match="model Scaffold needs the algorithm ScaffoldServer"):
        fit(tmp_path, ScaffoldLeastSquares(), algorithm=FedAvg())


def test_another_methods_checkpoint(tmp_path: Path) -> None:
    server = ScaffoldServer()
    fit(tmp_path, ScaffoldLeastSquares(), algorithm=server, max_rounds=1)
    with pytest.raises(CheckpointError, match="not saved by SCAFFOLD"):
        server.load_state_dict({"state": server.state})


def test_runs_report_what_clients_send(tmp_path: Path) -> None:
    run = run_quickstart(tmp_path, "--model", "Scaffold", "--algorithm", "ScaffoldServer")
    assert all(
        float(row["comm/uplink_bytes"]) == float(row["comm/downlink_bytes"]) for row in rows(run / "metrics.csv")
    )
