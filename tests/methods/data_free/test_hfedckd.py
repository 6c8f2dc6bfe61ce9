"""HFedCKD against arithmetic."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.methods import HFedCKD
from lit_fed.methods.data_free.hfedckd import GATES, SAMPLES, TARGETS
from lit_fed.participation import AvailabilityParticipation
from tests.methods.data_free.support import Halves, Listen
from tests.methods.support import Rota, run_quickstart
from tests.support import Points, assert_same, fit, kept, rows, saved_weights

SMALL: dict[str, Any] = {
    "generator": "features", "noise_size": 3, "width": 4, "generator_steps": 2, "generator_batch_size": 6,
    "pseudo_size": 8, "distillation_steps": 2,
}  # fmt: skip
OFF = {"ipwd": False, "contrast": False, "generator_steps": 0}


def cosine(one: Tensor, other: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(one, dim=1) * torch.linalg.vector_norm(other, dim=1)
    return (one * other).sum(1) / lengths


def contrast_by_hand(own: Tensor, near: Tensor, far: Tensor, temperature: float) -> float:
    plus, minus = (torch.exp(cosine(own, other) / temperature) for other in (near, far))
    return (-torch.log(plus / (plus + minus))).mean().item()


def test_the_two_contrasts_by_hand(tmp_path: Path) -> None:
    method = HFedCKD(**SMALL, encoder_weight=2.0, decoder_weight=3.0, temperature=0.4, distillation_weight=0.0)
    federation = fit(tmp_path, Halves(), Points(), method, max_rounds=1).run.federation
    batch = (torch.tensor([[1.0, 0.0], [0.3, 0.5]]), torch.tensor([2, 4]))
    states = {}
    with federation.session.at_work("fit"):
        client = federation.session.enter(0, federation.broadcast(1), "train")
        same = method.objective(client, batch)
        torch.manual_seed(1)
        states["own"] = {name: torch.randn_like(tensor) for name, tensor in client.begun.items()}
        client.forget()
        client.model.load(states["own"])
        terms = method.objective(client, batch)
        states["global"] = client.begun
        states["previous"] = {n.removeprefix("state/previous."): t for n, t in kept_by(federation, 0).items()}
    features, logits = {}, {}
    for name, state in states.items():
        network = Halves()
        network.load_state_dict(dict(state))
        with torch.no_grad():
            features[name] = network.body(batch[0])
            logits[name] = network(batch[0])
    encoder = contrast_by_hand(features["own"], features["global"], features["previous"], 0.4)
    decoder = contrast_by_hand(logits["own"], logits["previous"], logits["global"], 0.4)
    assert terms["encoder"].item() == pytest.approx(2 * encoder, rel=1e-5)
    assert terms["decoder"].item() == pytest.approx(3 * decoder, rel=1e-5)
    # As it begins, a client is the global network: cosine 1 to it.
    closed = torch.log1p(torch.exp((cosine(features["global"], features["previous"]) - 1) / 0.4)).mean()
    assert same["encoder"].item() == pytest.approx(2 * closed.item(), rel=1e-5)


def kept_by(federation: Any, client_id: int) -> dict[str, Tensor]:
    return dict(federation.store.get(client_id))


def test_identical_networks_have_contrasts_of_ln_2(tmp_path: Path) -> None:
    # Nothing moves at learning rate 0: global, previous and own network are the same.
    method = HFedCKD(**SMALL | OFF | {"contrast": True}, encoder_weight=1.0, decoder_weight=0.5)
    made = fit(tmp_path, Halves(lr=0.0), Points(), method, max_rounds=2)
    assert made.metrics["train/encoder"] == pytest.approx(math.log(2), abs=1e-6)
    assert made.metrics["train/decoder"] == pytest.approx(math.log(2) / 2, abs=1e-6)


def test_who_takes_part_for_the_first_time_has_no_contrast_and_is_counted(tmp_path: Path) -> None:
    method = HFedCKD(**SMALL | {"ipwd": False}, distillation_weight=0.0)
    made = fit(tmp_path, Halves(), Points(), method, max_rounds=3, participation=Rota())  # clients 0, 1, 0
    found = rows(tmp_path / "lightning_logs/version_0/metrics.csv")
    assert [float(row["server/first_participations"]) for row in found] == [1, 1, 0]
    assert [float(row["server/clients_seen"]) for row in found] == [1, 2, 2]
    # 2·4 + 4, 4·2 + 2 and 2·5 + 5 numbers of four bytes
    assert [float(row["server/history_bytes"]) for row in found] == [148.0] * 3
    assert [bool(row.get("train/encoder")) for row in found] == [False, False, True]
    assert kept(made, 0).keys() == {f"state/previous.{name}" for name in Halves().state_dict()}


def test_the_mean_is_by_the_weights_that_are_reported(tmp_path: Path) -> None:
    # Full participation: π = 1, so that w_i ∝ 1 + 5·δ_i, which differ from the second round on.
    listen = Listen()
    method = HFedCKD(**SMALL | {"distillation_steps": 0, "divergence_weight": 5.0})
    made = fit(tmp_path, Halves(), Points(), method, max_rounds=2, callbacks=[listen])
    found = rows(tmp_path / "lightning_logs/version_0/metrics.csv")
    largest = float(found[1]["server/ipwd_largest"])
    assert float(found[0]["server/ipwd_largest"]) == 0.5
    assert 0.5 < largest < 1
    size = 1 / (largest**2 + (1 - largest) ** 2)
    assert float(found[1]["server/ipwd_effective_size"]) == pytest.approx(size)
    sent = {update.client_id: update.payload["head.weight"] for update in listen.sent}
    mean = made.run.federation.server["models"]["model"]["head.weight"]
    ways = [largest * sent[one] + (1 - largest) * sent[1 - one] for one in (0, 1)]
    assert min(float((mean - way).abs().max()) for way in ways) < 1e-6


def test_the_inverse_of_the_probability_or_of_the_frequency(tmp_path: Path) -> None:
    # One of two clients a round, by turns: whoever is there has been there ⌈T/2⌉ of T times. It is alone: weight 1.
    method = HFedCKD(**SMALL | {"inclusion": "frequency"})
    made = fit(tmp_path, Halves(), Points(), method, max_rounds=3, participation=Rota())
    assert made.run.federation.server["participations"].tolist() == [2, 1]
    with pytest.raises(ConfigError, match=r"algorithm HFedCKD needs the probability .* AvailabilityParticipation"):
        fit(
            tmp_path / "unknown", Halves(), Points(), HFedCKD(**SMALL),
            participation=AvailabilityParticipation(count=1, availability=0.5, period=4),
        )  # fmt: skip


def test_one_step_of_distillation_by_hand(tmp_path: Path) -> None:
    # What is distilled with one step is the head's gradient of mean(g·CE(p, f)), on samples that are the next ones.
    listen = Listen()
    method = HFedCKD(
        **SMALL | {"distillation_steps": 1, "ipwd": False}, distillation_optimizer=lambda p: torch.optim.SGD(p, lr=0.3)
    )
    run = fit(tmp_path, Halves(), Points(sizes=(2, 2)), method, max_rounds=1, callbacks=[listen]).run
    server, seed = run.federation.server, (0, "hfedckd", 0, "distillation")
    noise, labels = next(method.pseudo.batches(server["prior"], 1, 6, seed))
    samples = method.pseudo.make(server["generator"], noise, labels)
    heads = {update.client_id: update.payload for update in listen.sent}
    # Each class has one client: its predictions alone are the target.
    owner = [heads[0 if label == 2 else 1] for label in labels.tolist()]
    targets = torch.stack(
        [(h["head.weight"] @ x + h["head.bias"]).softmax(0) for h, x in zip(owner, samples, strict=True)]
    )
    weight = ((heads[0]["head.weight"] + heads[1]["head.weight"]) / 2).requires_grad_()
    bias = (heads[0]["head.bias"] + heads[1]["head.bias"]) / 2
    loss = -(targets * (samples @ weight.T + bias).log_softmax(1)).sum(1).mean()
    expected = weight - 0.3 * torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(server["models"]["model"]["head.weight"], expected.detach(), rtol=1e-5, atol=1e-6)
    assert run.metrics["server/distillation"] == pytest.approx(loss.item(), rel=1e-5)


def test_what_clients_receive(tmp_path: Path) -> None:
    method = HFedCKD(**SMALL, gate_slope=10.0, gate_threshold=0.5)
    federation = fit(tmp_path, Halves(), Points(), method, max_rounds=1).run.federation
    received = federation.broadcast(1).payloads["model"]
    assert received[SAMPLES].shape == (8, 2)
    torch.testing.assert_close(received[TARGETS].sum(1), torch.ones(8))
    gates = 1 / (1 + torch.exp(-10 * (received[TARGETS].max(1).values - 0.5)))
    torch.testing.assert_close(received[GATES], gates)
    assert federation.broadcast(1, "test").payloads["model"].keys() == Halves().state_dict().keys()
    told = {name: tensor.shape for name, tensor in method.forecast(federation.server, 1, "model").items()}
    assert told == {name: tensor.shape for name, tensor in received.items()}


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_without_its_parts_it_is_fedavg(weighting: str, tmp_path: Path) -> None:
    off = ("--algorithm.ipwd", "false", "--algorithm.contrast", "false", "--algorithm.generator_steps", "0")
    options = ("--algorithm.weighting", weighting)
    hfedckd = run_quickstart(tmp_path / "hfedckd", "--algorithm", "HFedCKD", *options, *off)
    fedavg = run_quickstart(tmp_path / "fedavg", "--algorithm", "FedAvg", *options)
    assert_same(saved_weights(hfedckd), saved_weights(fedavg))


def test_where_everybody_is_as_likely_the_weights_are_uniform(tmp_path: Path) -> None:
    # π = ¼ for all: weights 1, 2 and 3 in rounds 0 to 2, clipped at 1/T, whole numbers, so that the sums are exact.
    off = ("--algorithm.contrast", "false", "--algorithm.generator_steps", "0")
    hfedckd = run_quickstart(tmp_path / "hfedckd", "--algorithm", "HFedCKD", *off, rounds=3)
    fedavg = run_quickstart(tmp_path / "fedavg", "--algorithm.weighting", "uniform", rounds=3)
    assert_same(saved_weights(hfedckd), saved_weights(fedavg))


def test_pictures_of_what_is_generated(tmp_path: Path) -> None:
    run = fit(tmp_path, Halves(), Points(), HFedCKD(**SMALL), max_rounds=1).run
    figure = run.federation.algorithm.figures(run.federation.server)["generated"]
    (image,) = figure.axes[0].images
    shown = image.get_array()
    assert shown is not None
    assert shown.shape == (5, 2)  # the mean of 2 features in each of 5 classes


def test_wrong_settings(tmp_path: Path) -> None:
    for name in ("exponent", "divergence_weight", "gate_slope", "encoder_weight", "decoder_weight"):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} is -1.0; it must be at least 0"):
            HFedCKD(**{name: -1.0})  # type: ignore[arg-type]  # one of the settings that are numbers
    with pytest.raises(ConfigError, match=r"algorithm\.temperature is 0"):
        HFedCKD(temperature=0.0)
    for threshold in (-0.001, 1.001, math.nan):  # of a probability
        with pytest.raises(ConfigError, match=r"algorithm\.gate_threshold is .*; it must be at least 0 and at most 1"):
            HFedCKD(gate_threshold=threshold)
    with pytest.raises(ConfigError, match=r"algorithm\.generator is 'x'"):
        HFedCKD(generator="x")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ConfigError, match=r"algorithm\.inclusion is 'x'"):
        HFedCKD(inclusion="x")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ConfigError, match=r"generator makes images, and a sample of the data has shape \(2,\)"):
        fit(tmp_path, Halves(), Points(), HFedCKD())
