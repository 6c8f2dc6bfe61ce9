"""APFL against arithmetic: the data of `tests.support.Points`, w = v = 0, learning rate ½."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import Classifier
from lit_fed.errors import ConfigError
from lit_fed.methods import APFL, FedAvg
from lit_fed.methods.apfl import MIXTURE, OWN
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.methods.support import ByHand, client_state, global_weight, run_quickstart
from tests.support import LeastSquares, Points, Wanderer, assert_same, client_states, fit, saved_weights, weights

V, ALPHA = f"network.weight{OWN}", f"network.{MIXTURE}"


@pytest.mark.parametrize("adaptive", [False, True])
def test_two_rounds_by_hand(tmp_path: Path, adaptive: bool) -> None:
    # The global model is FedAvg's: (0.25, 1.5) after round 0, (0.46875, 2.4375) after round 1 (test_fedavg.py).
    # α = ½. Round 0: the residuals at the mixture 0 are −2 and −4: v₀ = (½·½·2, 0) = (½, 0), v₁ = (0, 1); v − w = 0.
    # Round 1: client 0: mixture (0.375, 0.75), residual −1.625: v₀ = (0.5 + ½·½·1.625, 0) = (0.90625, 0)
    #          client 1: mixture (0.125, 1.25), residual −2.75: v₁ = (0, 1 + ½·½·2.75) = (0, 1.6875)
    # α: client 0: v − w = (0.25, −1.5): 0.5 + ½·1.625·0.25 = 0.703125; client 1: (−0.25, −0.5): 0.5 − ½·2.75·0.5
    made = fit(tmp_path, algorithm=APFL(adaptive=adaptive), max_rounds=2, protocols=[GlobalTest(), ClientTest()])
    assert global_weight(made) == [0.46875, 2.4375]
    own = [client_state(made, client) for client in (0, 1)]
    assert [one[V] for one in own] == [[[0.90625, 0.0]], [[0.0, 1.6875]]]
    alphas = (0.703125, -0.1875) if adaptive else (0.5, 0.5)
    if adaptive:
        assert [one[ALPHA] for one in own] == list(alphas)
    # Clients are tested with the mixture, client 1's with α at the bound 0; the global model on the pooled set.
    first, second = alphas[0], max(alphas[1], 0.0)
    residuals = first * 0.90625 + (1 - first) * 0.46875 - 2, second * 1.6875 + (1 - second) * 2.4375 - 4
    assert made.metrics["clients/loss_mean"] == pytest.approx(sum(one**2 for one in residuals) / 4)
    assert made.metrics["global/loss"] == pytest.approx((0.5 * 1.53125**2 + 3 * 0.5 * 1.5625**2) / 4)
    # Two float32 of four or five travel, to and from two clients.
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (16, 16)


def test_the_global_model_is_fedavgs_with_batch_norm(tmp_path: Path) -> None:
    def run(folder: str, algorithm: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        task = Wanderer(lr=0.1)
        task.network[2].p = 0.0  # type: ignore[index, union-attr]  # dropout, of which a mixture draws its own
        found = weights(fit(tmp_path / folder, task, Points(sizes=(2, 3)), algorithm, max_rounds=3))
        return {name: tensor for name, tensor in found.items() if not name.endswith(OWN)}

    assert_same(run("apfl", APFL()), run("fedavg", FedAvg()))


def test_with_alpha_0_clients_use_the_global_model(tmp_path: Path) -> None:
    runs = [
        fit(tmp_path / name, algorithm=algorithm, max_rounds=3)
        for name, algorithm in (("apfl", APFL(0.0, adaptive=False)), ("fedavg", FedAvg()))
    ]
    assert runs[0].metrics["clients/loss_mean"] == runs[1].metrics["clients/loss_mean"]
    assert client_state(runs[0], 1) == {V: [[0.0, 0.0]]}  # v's gradient is α times another


def test_with_alpha_1_clients_train_alone(tmp_path: Path) -> None:
    alone = run_quickstart(tmp_path / "alone", "--algorithm", "LocalOnly")
    apfl = run_quickstart(
        tmp_path / "apfl", "--algorithm", "APFL", "--algorithm.alpha", "1", "--algorithm.adaptive", "false"
    )
    fedavg = saved_weights(run_quickstart(tmp_path / "fedavg"))
    assert_same({name: tensor for name, tensor in saved_weights(apfl).items() if name in fedavg}, fedavg)
    theirs = client_states(alone)
    for name, state in client_states(apfl).items():
        assert_same({key.removesuffix(OWN): tensor for key, tensor in state.items()}, theirs[name])


def test_fine_tuning_starts_from_the_mixture(tmp_path: Path) -> None:
    # After round 0 of the test above: mixtures (0.375, 0.75) and (0.125, 1.25); one step each: 0.375 + ½·1.625 and
    # 1.25 + ½·2.75.
    made = fit(tmp_path, algorithm=APFL(adaptive=False), max_rounds=1, protocols=[PersonalTest()])
    assert made.metrics["personal/loss_mean"] == pytest.approx((0.8125**2 + 1.375**2) / 4)


def test_the_released_network_has_the_parameters_of_the_first(tmp_path: Path) -> None:
    task, method = Classifier("mlp", input_shape=(4,), in_channels=1), APFL()
    before = set(task.network.state_dict())
    method.adapt(task)
    method.adapt(task)  # once is enough
    assert len(task.network.state_dict()) == 2 * len(before) + 1
    assert set(method.release(task).state_dict()) == before


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is 1\.5"):
        APFL(alpha=1.5)
    with pytest.raises(ConfigError, match="ByHand optimises by hand, and algorithm APFL needs a loss"):
        fit(tmp_path, ByHand(), algorithm=APFL())


@pytest.mark.parametrize("adaptive", [True, False])
def test_alpha_has_all_digits_of_a_64_bit_run(tmp_path: Path, adaptive: bool) -> None:
    # Of w = 0 and v = 1 the mixture is α; 0.1 in float32 is 0.10000000149.
    task = LeastSquares()
    method = APFL(alpha=0.1, adaptive=adaptive)
    made = fit(tmp_path, task, algorithm=method, max_rounds=1, precision="64-true", evaluate_every=0)
    assert {tensor.dtype for tensor in weights(made).values()} == {torch.float64}
    found = [float(tensor) for name, tensor in made.run.federation.server["model"].items() if "alpha" in name]
    assert found == ([0.1] if adaptive else [])
    held = {"w": torch.zeros(1, dtype=torch.float64), "w_apfl": torch.ones(1, dtype=torch.float64)}
    assert adaptive or float(method._mixed(held)["w"]) == 0.1
