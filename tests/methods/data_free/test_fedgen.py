"""FedGen against arithmetic and autograd by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.methods import FedGen
from lit_fed.methods.data_free.fedgen import GENERATOR, PRIOR
from lit_fed.participation import UniformParticipation
from lit_fed.seeding import torch_generator
from tests.methods.data_free.support import Halves, Listen, three_widths
from tests.methods.support import run_quickstart
from tests.support import Points, assert_same, fit, saved_weights

SMALL: dict[str, Any] = {"noise_size": 3, "hidden": 4, "generator_steps": 1, "generator_batch_size": 6}


def by_hand(weights: dict[str, Tensor], noise: Tensor, labels: Tensor, training: bool) -> Tensor:
    """The generator's features, written out."""
    hidden = torch.cat([noise, torch.eye(5)[labels]], 1) @ weights["body.0.weight"].T + weights["body.0.bias"]
    mean = hidden.mean(0) if training else weights["body.1.running_mean"]
    variance = ((hidden - hidden.mean(0)) ** 2).mean(0) if training else weights["body.1.running_var"]
    hidden = (hidden - mean) / (variance + 1e-5).sqrt() * weights["body.1.weight"] + weights["body.1.bias"]
    return hidden.clamp_min(0) @ weights["body.3.weight"].T + weights["body.3.bias"]


def test_the_generators_step_is_autograds_by_hand(tmp_path: Path) -> None:
    # Client 0 has one sample of class 2, client 1 three of class 4: each has its class to itself, prior ¼ and ¾.
    listen = Listen()
    none = FedGen(**SMALL | {"generator_steps": 0}, generator_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    before = fit(tmp_path / "none", Halves(), Points(), none, max_rounds=1, callbacks=[listen]).run.federation.server
    begin = {name: tensor.clone() for name, tensor in before["generator"].items()}
    one = FedGen(**SMALL, diversity=0.5, generator_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    after = fit(tmp_path / "one", Halves(), Points(), one, max_rounds=1, callbacks=[listen]).run
    heads = {update.client_id: update.payload for update in listen.sent}

    random = torch_generator(0, "fedgen", 0, "draws")
    noise = torch.rand(6, 3, generator=random)
    prior = torch.tensor([0, 0, 0.25, 0, 0.75], dtype=torch.float64)
    labels = torch.multinomial(prior, 6, replacement=True, generator=random)
    weights = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in begin.items()}
    made = by_hand(weights, noise, labels, training=True)
    loss = torch.zeros(())
    for sample, label in zip(made, labels.tolist(), strict=True):
        head = heads[0 if label == 2 else 1]
        logits = head["head.weight"] @ sample + head["head.bias"]
        loss = loss - (logits[label] - logits.logsumexp(0)) / 6
    cross_entropy = loss
    spread = torch.zeros(())
    for i in range(6):
        for j in range(6):
            spread = spread + (noise[i] - noise[j]).square().mean() * (made[i] - made[j]).abs().mean() / 36
    loss = loss + 0.5 * torch.exp(-spread)
    names = [name for name, t in weights.items() if t.requires_grad and "running" not in name]
    for name, gradient in zip(names, torch.autograd.grad(loss, [weights[n] for n in names]), strict=True):
        torch.testing.assert_close(
            after.federation.server["generator"][name], begin[name] - 0.1 * gradient, rtol=1e-5, atol=1e-6
        )
    assert after.metrics["server/generator_cross_entropy"] == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert after.metrics["server/generator_diversity"] == pytest.approx(0.5 * torch.exp(-spread).item(), rel=1e-5)
    assert after.federation.server["prior"].tolist() == prior.tolist()


def test_a_clients_terms_by_hand(tmp_path: Path) -> None:
    method = FedGen(alpha=3.0, beta=2.0, decay=0.5, **SMALL)
    federation = fit(tmp_path, Halves(), Points(), method, max_rounds=1).run.federation
    with federation.session.at_work("fit"):
        broadcast = federation.broadcast(2)
        client = federation.session.enter(1, broadcast, "train")
        batch = (torch.eye(2), torch.tensor([4, 2]))
        torch.manual_seed(5)
        terms = method.objective(client, batch)
        logits = client.run(batch).logits
    received, model = broadcast.payloads["model"], federation.server["models"]["model"]
    weights = {name.removeprefix(GENERATOR): tensor for name, tensor in received.items() if GENERATOR in name}
    torch.manual_seed(5)
    drawn = torch.multinomial(received[PRIOR], 2, replacement=True)
    seen = by_hand(weights, torch.rand(2, 3), drawn, training=False) @ model["head.weight"].T + model["head.bias"]
    log = seen.log_softmax(1)
    # α·γ² = 3/4, β·γ² = 1/2 in round 2
    assert terms["pseudo"].item() == pytest.approx(0.75 * -(log[0, drawn[0]] + log[1, drawn[1]]).item() / 2, rel=1e-5)
    seen = by_hand(weights, torch.rand(2, 3), batch[1], training=False) @ model["head.weight"].T + model["head.bias"]
    target = seen.softmax(1)
    assert logits is not None
    divergence = (target * (target.log() - logits.log_softmax(1))).sum(1).mean()
    assert terms["latent"].item() == pytest.approx(0.5 * divergence.item(), rel=1e-4)
    assert terms.keys() == {"task", "pseudo", "latent"}


def test_before_the_generator_has_learnt_and_in_tests_only_the_network_is_sent(tmp_path: Path) -> None:
    federation = fit(tmp_path, Halves(), Points(), FedGen(**SMALL), max_rounds=1).run.federation
    tested = federation.broadcast(1, "test").payloads["model"]
    assert tested.keys() == Halves().state_dict().keys()
    assert federation.broadcast(1).payloads["model"].keys() > tested.keys()
    federation.server["learnt"] = False
    assert federation.broadcast(1).payloads["model"].keys() == tested.keys()


def test_without_its_terms_it_is_fedavg(tmp_path: Path) -> None:
    options = ("--algorithm", "FedGen", "--algorithm.alpha", "0", "--algorithm.beta", "0")
    fedgen = run_quickstart(tmp_path / "fedgen", *options, "--algorithm.generator_steps", "3")
    assert_same(saved_weights(fedgen), saved_weights(run_quickstart(tmp_path / "fedavg")))


def test_a_class_that_the_round_lacks_is_not_drawn(tmp_path: Path) -> None:
    method = FedGen(**SMALL, label_prior=[0, 0, 1, 0, 1])
    made = fit(tmp_path, Halves(), Points(), method, max_rounds=1)
    assert made.run.federation.server["prior"].tolist() == [0, 0, 0.5, 0, 0.5]
    method = FedGen(**SMALL, label_prior=[0, 0, 1, 0, 1])
    made = fit(tmp_path, Halves(), Points(), method, max_rounds=1, participation=UniformParticipation(count=1))
    assert sorted(made.run.federation.server["prior"].tolist()) == [0, 0, 0, 0, 1]


def test_wrong_settings() -> None:
    for name, value in (("alpha", -1.0), ("beta", -1.0), ("decay", -0.1), ("generator_steps", -1), ("diversity", -1.0)):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} is {value}; it must be at least 0"):
            FedGen(**{name: value})  # type: ignore[arg-type]  # one of the settings that are numbers
    with pytest.raises(ConfigError, match=r"algorithm\.generator_batch_size is 1; it must be at least 2"):
        FedGen(generator_batch_size=1)
    with pytest.raises(ConfigError, match=r"algorithm\.label_prior is \[0.0, 0.0\]; it must be a weight of at least 0"):
        FedGen(label_prior=[0.0, 0.0])
    with pytest.raises(ConfigError, match=r"algorithm\.weighting is 'x'"):
        FedGen(weighting="x")  # type: ignore[arg-type]  # the mistake


def test_a_label_prior_of_an_absent_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_prior is 0.5 for class 1, and no client has a training sample"):
        fit(tmp_path, Halves(), Points(), FedGen(label_prior=[0, 0.5, 0.5, 0, 0]))
    with pytest.raises(ConfigError, match=r"label_prior has 2 weights, and the data have 5 classes"):
        fit(tmp_path, Halves(), Points(), FedGen(label_prior=[0.5, 0.5]))


def test_networks_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"features.* 'one' and 'other' have 2 and 3 features; give them one length"):
        fit(tmp_path, {"one": Halves(), "other": Halves(features=3)}, Points(), FedGen())
    unsplit = Halves()
    unsplit.body.append(unsplit.head)
    unsplit.head = nn.Identity()  # type: ignore[assignment]  # the mistake
    with pytest.raises(ConfigError, match=r"the head Identity of model Halves has no linear layer"):
        fit(tmp_path, unsplit, Points(), FedGen())
    many = Halves()
    many.head = nn.Linear(2, 7)
    with pytest.raises(ConfigError, match=r"needs logits \(B, 5\) .* the head of model Halves gives \(2, 7\)"):
        fit(tmp_path, many, Points(), FedGen())
    with pytest.raises(
        ConfigError, match=r"trainer\.kinds 'quarter' has no client, because there are 3 kinds and 2 clients"
    ):
        fit(tmp_path, three_widths(), Points(), FedGen())
