"""pFedHN against arithmetic, and the authors' step: `tests.support.Points`, learning rate ½."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed import Classifier
from lit_fed.algorithm import ClientUpdate, Cohort
from lit_fed.data import ClassesPerClient, Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import PFedHN
from lit_fed.protocols import ClientTest, GlobalTest
from tests.methods.support import Rota
from tests.support import Points, Wanderer, fit

V, W_1, B_1, W_2, B_2 = "embeddings.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"


class Given(PFedHN):
    """θ_i = (1, 2)·v_i + (0, 0) with v = (1, 3), as a linear h of one hidden unit."""

    def setup(self, *args: Any) -> Any:
        server = super().setup(*args)
        values = {V: [[1.0], [3.0]], W_1: [[1.0]], B_1: [0.0], W_2: [[1.0], [2.0]], B_2: [0.0, 0.0]}
        for name, value in values.items():
            server["hyper"][name].copy_(torch.tensor(value))
        return server


def given(**kwargs: Any) -> Given:
    return Given(**({"embedding": 1, "width": 1, "hidden": 0, "momentum": 0.5, "weight_decay": 0.0} | kwargs))


def hyper(made: Any) -> dict[str, list[Any]]:
    return {name: tensor.flatten().tolist() for name, tensor in made.run.federation.server["hyper"].items()}


def test_two_rounds_of_one_client_by_hand(tmp_path: Path) -> None:
    # Round 0, client 0: θ = (1, 2), its gradient (1 − 2, 0), so Δθ = (½, 0). With u = W_1 v + b_1 = 1, the gradients of
    # −Δθ·θ are: W_2: (−½, 0), b_2: (−½, 0), u: −½·1, so that W_1: −½·v = −½, b_1: −½, v_0: −½·W_1 = −½. Steps of 1.
    method = given(server_lr=1.0)
    made = fit(tmp_path / "one", algorithm=method, participation=Rota(), max_rounds=1)
    assert hyper(made) == {V: [1.5, 3.0], W_1: [1.5], B_1: [0.5], W_2: [1.5, 2.0], B_2: [0.5, 0.0]}
    assert (made.metrics["comm/downlink_bytes"], made.metrics["comm/uplink_bytes"]) == (8, 8)
    assert made.metrics["server/gradient_norm"] == pytest.approx((5 * 0.25) ** 0.5)
    # Round 1, client 1: u = 1.5·3 + ½ = 5; θ = (1.5·5 + ½, 10) = (8, 10), Δθ = ½·(0, 4 − 10) = (0, −3). Gradients: W_2:
    # (0, 3·5), b_2: (0, 3), u: 3·2 = 6, W_1: 6·3 = 18, b_1: 6, v_1: 6·1.5 = 9. Momentum: ½ of the step before, which
    # moves v_0, too.
    made = fit(tmp_path / "two", algorithm=given(server_lr=1.0), participation=Rota())
    assert hyper(made) == {
        V: [1.75, -6.0], W_1: [1.5 - 18 + 0.25], B_1: [0.5 - 6 + 0.25], W_2: [1.75, 2 - 15], B_2: [0.75, -3.0]
    }  # fmt: skip


def test_a_mean_over_the_rounds_clients_clipped(tmp_path: Path) -> None:
    # Both: client 1 has θ = (3, 6), u = 3, Δθ = ½·(0, 4 − 6) = (0, −1): W_2: (0, 3), b_2: (0, 1), u: 2, W_1: 6, b_1: 2,
    # v_1: 2. With client 0's as above the mean gradient is W_2 (−¼, 1½), b_2 (−¼, ½), W_1 2¾, b_1 ¾, v (−¼, 1).
    whole = {V: [-0.25, 1.0], W_1: [2.75], B_1: [0.75], W_2: [-0.25, 1.5], B_2: [-0.25, 0.5]}
    before = {V: [1.0, 3.0], W_1: [1.0], B_1: [0.0], W_2: [1.0, 2.0], B_2: [0.0, 0.0]}
    norm = sum(value**2 for values in whole.values() for value in values) ** 0.5
    for clip in (50.0, 1.0):
        made = fit(tmp_path / f"{clip}", algorithm=given(server_lr=1.0, clip=clip), max_rounds=1)
        for name, values in hyper(made).items():
            steps = [value * min(1.0, clip / norm) for value in whole[name]]
            assert values == pytest.approx(
                [old - step for old, step in zip(before[name], steps, strict=True)], rel=1e-5
            )


def test_a_client_is_tested_with_the_model_that_it_would_train(tmp_path: Path) -> None:
    # After round 0 of client 0 as above: θ_0 = (1.5·2.75 + ½, 2·2.75), θ_1 = (8, 10).
    protocols = [ClientTest(), GlobalTest()]
    made = fit(tmp_path, algorithm=given(server_lr=1.0), participation=Rota(), max_rounds=1, protocols=protocols)
    assert made.metrics["clients/loss_mean"] == pytest.approx(((4.625 - 2) ** 2 + (10 - 4) ** 2) / 4)
    assert "global/loss" not in made.metrics


def test_a_step_is_the_authors(tmp_path: Path) -> None:
    """The update of ``experiments/pfedhn/trainer.py`` at 07b53d68e1ef, with a layer for each parameter, and its SGD."""
    torch.manual_seed(0)
    made = fit(tmp_path / "begun", Wanderer(), Points(2, sizes=(2, 3)), PFedHN(width=5, hidden=2), max_rounds=0 + 1,
               participation=Rota())  # fmt: skip
    method: Any = made.run.federation.algorithm
    server = made.run.federation.server
    names = list(method.shapes)
    held = {name: tensor.clone() for name, tensor in server["hyper"].items()}
    embeddings = nn.Embedding.from_pretrained(held[V].clone(), freeze=False)
    mlp = nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    mlp.load_state_dict({f"{i}.{part}": held[f"layers.{i}.{part}"] for i in (0, 2, 4) for part in ("weight", "bias")})
    sizes = [method.shapes[name].numel() for name in names]
    layers: Any = nn.ModuleList()
    for weight, bias in zip(held["layers.5.weight"].split(sizes), held["layers.5.bias"].split(sizes), strict=True):
        layers.append(layer := nn.Linear(5, len(bias)))
        layer.load_state_dict({"weight": weight, "bias": bias})
    hnet = nn.ModuleDict({"embeddings": embeddings, "mlp": mlp, "layers": layers})
    weights = OrderedDict(
        (name, layer(mlp(embeddings(torch.tensor([1])))).view(method.shapes[name]))
        for name, layer in zip(names, layers, strict=True)
    )
    for name, tensor in method.address(server, 1, 1, "model").items():
        torch.testing.assert_close(tensor, weights[name])
    delta = {name: torch.randn(shape) for name, shape in method.shapes.items()}
    optimizer = torch.optim.SGD(hnet.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    grads = torch.autograd.grad(list(weights.values()), list(hnet.parameters()), [-delta[name] for name in names])
    for parameter, gradient in zip(hnet.parameters(), grads, strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(hnet.parameters(), 50)
    optimizer.step()

    for momentum in server["momentum"].values():
        momentum.zero_()
    payload = {**{f"delta.{name}": tensor for name, tensor in delta.items()}, **server["buffers"]}
    method.step(server, [ClientUpdate(1, payload)], Cohort(1, (1,), 2))
    found = server["hyper"]
    torch.testing.assert_close(found[V], embeddings.weight.data)
    for name, tensor in mlp.state_dict().items():
        torch.testing.assert_close(found[f"layers.{name}"], tensor)
    torch.testing.assert_close(found["layers.5.weight"], torch.cat([layer.weight.data for layer in layers]))
    torch.testing.assert_close(found["layers.5.bias"], torch.cat([layer.bias.data for layer in layers]))


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    def run(executor: str) -> Any:
        torch.manual_seed(0)
        net = Classifier("mlp", lambda p: torch.optim.SGD(p, lr=0.1), input_shape=(1, 8, 8))
        data = Digits(num_clients=4, partition=ClassesPerClient(2), max_train_samples=200, batch_size=16)
        return fit(tmp_path / executor, net, data, PFedHN(0.1, width=10), executor=executor, max_rounds=3)

    alone, grouped = run("sequential"), run("vectorized")
    for name, tensor in alone.run.federation.server["hyper"].items():
        torch.testing.assert_close(grouped.run.federation.server["hyper"][name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"server_lr": 0.0}, {"momentum": 1.0}, {"weight_decay": -1.0}, {"embedding": 0}, {"width": 0}, {"hidden": -1},
     {"clip": 0.0}],
)  # fmt: skip
def test_wrong_settings(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"algorithm\.{name} is"):
        PFedHN(**settings)
