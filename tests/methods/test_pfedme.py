"""pFedMe against arithmetic: the data of `tests.support.Points`, w = 0; λ = 2, two steps of θ at rate ½."""

from pathlib import Path

import pytest
import torch

from lit_fed import Classifier
from lit_fed.data import Digits
from lit_fed.engine.lightning.compatibility import check_optimization
from lit_fed.engine.lightning.task_trainer import GradientOptions
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, PFedMe
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.methods.support import Rota, client_state, global_weight
from tests.support import LeastSquares, fit, weights

SMALL = {"lam": 2.0, "personal_steps": 2, "personal_lr": 0.5}
THETA = "state/own.network.weight"


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: client 0: θ₁ = 0 + ½·2 = 1, then 1 − ½(−1 + 2·1) = ½; w₁ = 0 + ½·2·½ = ½
    #          client 1: θ₂ = 2, then 2 − ½(−2 + 2·2) = 1; w₂ = 1; mean (0.25, 0.5)
    # Round 1: client 0: θ₁ = 0.25 + ½·1.75 = 1.125, then 1.125 − ½(−0.875 + 2·0.875) = 0.6875; w₁ = 0.25 + 0.4375
    #          client 1: θ₂ = 0.5 + ½·3.5 = 2.25, then 2.25 − ½(−1.75 + 2·1.75) = 1.375; w₂ = 0.5 + 0.875
    #   mean ((0.6875 + 0.25)/2, (0.5 + 1.375)/2)
    made = fit(tmp_path, algorithm=PFedMe(**SMALL), protocols=[GlobalTest(), ClientTest()])
    assert global_weight(made) == [0.46875, 0.9375]
    assert [client_state(made, client)[THETA] for client in (0, 1)] == [[[0.6875, 0.5]], [[0.25, 1.375]]]
    # Clients are tested with θ; the global model on the pooled set.
    assert made.metrics["clients/loss_mean"] == pytest.approx((1.3125**2 + 2.625**2) / 4)
    assert made.metrics["global/loss"] == pytest.approx((1.53125**2 + 3 * 3.0625**2) / 8)


def test_theta_goes_on_from_batch_to_batch(tmp_path: Path) -> None:
    # Learning rate ¼. Client 0, first batch: θ₁ = ½, w₁ = ¼·2·½ = ¼. Second: θ₁ = ½ − ½(−1.5 + 2·¼) = 1, then
    #   1 − ½(−1 + 2·¾) = ¾; w₁ = ¼ + ½·½. From θ₁ = w₁ it would be 0.6875. Client 1 likewise, twice that.
    made = fit(tmp_path, LeastSquares(lr=0.25), algorithm=PFedMe(**SMALL), max_rounds=1, local_epochs=2)
    assert [client_state(made, client)[THETA] for client in (0, 1)] == [[[0.75, 0.0]], [[0.0, 1.5]]]
    assert global_weight(made) == [0.25, 0.5]


def test_the_server_moves_by_beta(tmp_path: Path) -> None:
    made = fit(tmp_path, algorithm=PFedMe(**SMALL, beta=0.5), max_rounds=1)
    assert global_weight(made) == [0.125, 0.25]


def test_a_client_without_theta_is_tested_with_the_global_model(tmp_path: Path) -> None:
    # Client 0 alone: w = θ = (½, 0): ½·1.5²; client 1 has w: ½·4².
    made = fit(tmp_path, algorithm=PFedMe(**SMALL), max_rounds=1, participation=Rota())
    assert made.metrics["clients/loss_mean"] == pytest.approx((1.125 + 8) / 2)


def test_fine_tuning_starts_from_theta(tmp_path: Path) -> None:
    # θ = (½, 0) and (0, 1); one step each: 1.25 and 2.5.
    made = fit(tmp_path, algorithm=PFedMe(**SMALL), max_rounds=1, protocols=[PersonalTest()])
    assert made.metrics["personal/loss_mean"] == pytest.approx((0.75**2 + 1.5**2) / 4)


def test_with_one_step_at_rate_1_over_lambda_it_is_fedavg(tmp_path: Path) -> None:
    # θ = w − ∇ℓ(w)/λ, so that w moves along ∇ℓ(w); λ is a power of two, and w₂ weighs as w₁.
    made = fit(tmp_path / "pfedme", algorithm=PFedMe(lam=4.0, personal_steps=1, personal_lr=0.25))
    assert global_weight(made) == global_weight(fit(tmp_path / "fedavg", algorithm=FedAvg("uniform")))


def test_as_lambda_grows_it_becomes_fedavg(tmp_path: Path) -> None:
    """Not to the bit: the second step's gradient is taken at the first's θ, which is ∇ℓ/λ away from w."""

    def run(name: str, algorithm: FedAvg) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        task = Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), input_shape=(1, 8, 8))
        data = Digits(num_clients=3, max_train_samples=120, batch_size=16)
        return weights(fit(tmp_path / name, task, data, algorithm, precision="64-true", protocols=[]))

    fedavg = run("fedavg", FedAvg("uniform"))
    far = []
    for lam in (1e2, 1e4):
        found = run(f"{lam}", PFedMe(lam, personal_steps=2, personal_lr=1 / lam))
        far.append(max(float((found[name] - tensor).abs().max()) for name, tensor in fedavg.items()))
    assert far[0] < 1e-2
    assert far[1] < far[0] / 50


def test_wrong_settings(tmp_path: Path) -> None:
    for name in ("lam", "personal_lr", "beta"):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} is 0"):
            PFedMe(**{name: 0.0})
    with pytest.raises(ConfigError, match=r"algorithm\.personal_steps is 0"):
        PFedMe(personal_steps=0)
    with pytest.raises(ConfigError, match="algorithm PFedMe needs whole batches, which strategy=ddp would cut"):
        check_optimization(LeastSquares(), PFedMe(), data_parallel=True, gradients=GradientOptions())
    with pytest.raises(ConfigError, match=r"executor=vectorized cannot train these clients: .*; use sequential"):
        fit(tmp_path, algorithm=PFedMe(), executor="vectorized")
