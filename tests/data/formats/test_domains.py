"""Domains: reductions, their clients' samples and looks, shared sets, refusals, and runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from lit_fed.command.start import main
from lit_fed.data import (
    ArrayFile,
    ClassesPerClient,
    ClientArrays,
    Diabetes,
    DigitPairs,
    Digits,
    Dirichlet,
    Domains,
    Natural,
    NoiseLevels,
)
from lit_fed.errors import ConfigError
from lit_fed.poses import Puppets
from tests.support import assert_same, rows, run_cli, saved_weights

INVERSE = v2.Normalize(mean=[1.0], std=[-1.0])  # 1 − x


def ready(domains: dict[str, Any], public_size: int = 0, calibration: float = 0.0, **kwargs: Any) -> Domains:
    data = Domains(domains, **kwargs)
    data.reserve(public_size, calibration)
    data.setup()
    return data


def batches(loader: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, y) for x, y in loader]


def same(first: Any, second: Any) -> bool:
    pairs = list(zip(batches(first), batches(second), strict=True))
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)


def test_one_domain_of_several_clients_is_its_data_set() -> None:
    settings: dict[str, Any] = {"num_clients": 4, "partition": Dirichlet(0.5)}
    population: dict[str, Any] = {"seed": 3, "val_fraction": 0.2, "max_test_samples": 100, "batch_size": 16}
    alone = Digits(**settings, **population)
    alone.reserve(20, 0.1)
    alone.setup()
    data = ready({"digits": Digits(**settings)}, 20, 0.1, **population)
    assert data.num_clients == 4
    assert data._ready.digest() == alone._ready.digest()
    for client in range(4):
        first, second = (one.train_loader(client, torch.Generator().manual_seed(1)) for one in (alone, data))
        assert same(first, second)
        for name in ("val_loader", "test_loader", "calibration_loader"):
            assert same(getattr(alone, name)(client), getattr(data, name)(client))
    assert same(alone.test_loader(), data.test_loader())
    assert same(alone.public_loader(), data.public_loader())
    assert data.record.contents.is_of(alone.record.contents)
    assert data.stored_like() == alone.stored_like()
    assert data.preprocessing() == alone.preprocessing()


def test_every_domain_is_a_client_with_its_own_samples_look_and_tests() -> None:
    looks: dict[str, Any] = {"inverted": INVERSE}
    data = ready({"plain": Digits(), "inverted": Digits(max_train_samples=200, seed=5)}, transforms=looks)
    digits = Digits().load_arrays()
    assert (data.num_clients, data.client_names) == (2, ["plain", "inverted"])
    assert [data.census.num_samples(client) for client in range(2)] == [len(digits.train), 200]
    scaled = (torch.from_numpy(digits.test.x).float() / 16 - 0.3053) / 0.3760
    for client, wanted in ((0, scaled), (1, 1 - scaled)):
        x, y = (torch.cat(parts) for parts in zip(*data.test_loader(client), strict=True))
        # Test samples are drawn to match the classes of training, of which there are more: all.
        kept = data._ready.test[client] - client * len(digits.test)
        assert torch.allclose(x, wanted[kept], atol=1e-5)
        assert y.tolist() == digits.test.y[kept].tolist()
    assert data.census.class_counts(0).tolist() == np.bincount(digits.train.y).tolist()
    x, _ = (torch.cat(parts) for parts in zip(*data.test_loader(), strict=True))
    assert torch.allclose(x, torch.cat([scaled, 1 - scaled]), atol=1e-5)
    assert data.test_loader().num_samples == 2 * len(digits.test)
    assert [data.describe(client)["domain"] for client in range(2)] == ["plain", "inverted"]


def test_domains_have_clients_partitions_and_skews_of_their_own() -> None:
    few = Digits(num_clients=2, partition=ClassesPerClient(k=5), skew=NoiseLevels(sigma=1.0))
    data = ready({"one": Digits(), "few": few})
    assert data.client_names == ["one", "few/0", "few/1"]
    assert [int((data.census.class_counts(client) > 0).sum()) for client in range(3)] == [10, 5, 5]
    assert data.seen(0) is None
    assert data.seen(1) is not None
    held = [set(data._ready.train[client].tolist()) for client in range(3)]
    assert not held[0] & (held[1] | held[2])
    assert not held[1] & held[2]
    assert min(held[1] | held[2]) >= len(Digits().load_arrays().train)


def test_the_public_set_is_of_all_domains_with_the_place_of_each_sample() -> None:
    data = ready({"a": Digits(), "b": Digits()}, 60, transforms={"b": INVERSE}, val_fraction=0.1)
    ordered = batches(data.public_loader())
    places = torch.cat([index for _, index in ordered])
    assert places.tolist() == list(range(60))
    x = torch.cat([images for images, _ in ordered])
    mixed = batches(data.public_loader(torch.Generator().manual_seed(0)))
    order = torch.cat([index for _, index in mixed])
    assert sorted(order.tolist()) == list(range(60))
    assert torch.equal(torch.cat([images for images, _ in mixed]), x[order])
    stored = Digits()
    stored.setup()
    offset = len(Digits().load_arrays().train)
    for place, row in enumerate(data._ready.public.tolist()):
        plain = (torch.from_numpy(stored.stored("train", np.array([row % offset]))[0]).float() / 16 - 0.3053) / 0.3760
        assert torch.allclose(x[place], plain[0] if row < offset else 1 - plain[0], atol=1e-5)
    pooled = batches(data.train_dataloader())
    assert sum(len(y) for _, y in pooled) == 2 * offset - 60 - len(data._ready.shared_val)
    assert same(data.train_dataloader(), data.train_dataloader())


def test_some_clients_only_have_the_batches_of_the_whole_population() -> None:
    def domains() -> dict[str, Any]:
        return {"a": Digits(num_clients=2), "b": Digits(max_train_samples=100), "c": Digits()}

    whole, part = Domains(domains(), transforms={"b": INVERSE}), Domains(domains(), transforms={"b": INVERSE})
    whole.setup()
    part.setup(clients=[1, 2])
    for client in (1, 2):
        first, second = (one.train_loader(client, torch.Generator().manual_seed(4)) for one in (whole, part))
        assert same(first, second)
        assert same(whole.test_loader(client), part.test_loader(client))
    assert part.record.sha256 == whole.record.sha256
    with pytest.raises(ConfigError, match="client 3's data are not here"):
        part.train_loader(3, torch.Generator())


def test_targets_of_a_regression_and_natural_clients_pass_through(tmp_path: Path) -> None:
    data = ready({"a": Diabetes(), "b": Diabetes(num_clients=2, partition=Dirichlet(1.0))})
    assert (data.num_classes, data.output_shape, data.num_clients) == (None, (), 3)
    indices = data._ready.train[1]
    values = data.target_values(indices)
    assert values is not None
    assert np.allclose(values, Diabetes().load_arrays().train.y[indices - 354])
    x, y = np.zeros((12, 3), np.float32), np.arange(12) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, client_train=y, client_test=y)
    people = ready({"p": ArrayFile(root=str(tmp_path), name="a"), "q": ArrayFile(root=str(tmp_path), name="a")})
    assert people.num_clients == 4
    assert people.client_names == ["p/0", "p/1", "q/0", "q/1"]
    assert people.census.class_histogram().tolist() == [[6, 0], [0, 6]] * 2
    assert "data.domains.p: data.num_classes" in str(people.pooled())


CONFIGS = Path(__file__).parents[3] / "configs"


def words(root: Path, *more: str) -> list[str]:
    files = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(CONFIGS / "data" / "digit_domains.yaml")]
    full = ("--trainer.participation", "FullParticipation", "--trainer.local_epochs", "1")
    return ["fit", *files, *full, "--trainer.default_root_dir", str(root), *more]


def test_a_federation_of_domains_runs_by_configuration_alone(tmp_path: Path) -> None:
    main(words(tmp_path, "--trainer.max_rounds", "1", "--data.seed", "3"))
    run = tmp_path / "lightning_logs" / "version_0"
    clients = json.loads((run / "partition.json").read_text())["clients"].values()
    assert [row["domain"] for row in clients] == ["plain", "inverted", "blurred", "faint"]
    assert [len(row["indices"]) for row in clients] == [350] * 4
    assert 0 < float(rows(run / "metrics.csv")[0]["clients/acc_mean"]) <= 1


@pytest.mark.long
def test_two_processes_and_a_resumed_run_give_the_weights_of_one(tmp_path: Path) -> None:
    def run(name: str, *more: str) -> dict[str, torch.Tensor]:
        done = run_cli(*words(tmp_path / name, *more), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return saved_weights(tmp_path / name / "lightning_logs" / "version_0")

    alone = run("alone", "--trainer.max_rounds", "2")
    assert_same(alone, run("both", "--trainer.max_rounds", "2", "--trainer.devices", "2"))
    run("resumed", "--trainer.max_rounds", "1")
    assert_same(alone, run("resumed", "--trainer.max_rounds", "2", "--ckpt_path", "last"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Domains({}), "data.domains is empty; give one data module or more"),
        (lambda: Domains({"a": Digits()}, {"b": INVERSE}), "data.transforms names 'b', and data.domains has a"),
        (lambda: Domains({"a": Digits(batch_size=7)}), "data.domains.a.batch_size is 7, and all domains share it"),
        (lambda: Domains({"a": Digits(val_fraction=0.1)}), "data.domains.a.val_fraction is 0.1, and all domains"),
        (lambda: Domains({"a": Domains({"b": Digits()})}), "data.domains.a: Domains cannot be a domain; name its own"),
        (lambda: Domains({"a": ClientArrays(2, [3])}), "data.domains.a: ClientArrays has a make_cut of its own"),
        (lambda: Domains({"a": Puppets()}), "data.domains.a: Puppets has a"),
        (lambda: ready({"a": Digits(), "b": DigitPairs()}), "a has input_shape (1, 8, 8), and data.domains.b has (1"),
        (lambda: ready({"a": Digits(), "b": Digits(image_size=16)}), "domains share classes and shapes"),
        (lambda: ready({"a": Digits(partition=Natural())}), "partition Natural needs a data set that names the client"),
        (lambda: next(iter(ready({"a": Digits()}, transforms={"a": v2.Resize(4)}).test_loader())), "keeps their shape"),
        (lambda: ready({"a": Digits()}).new_inputs(Path("x.npz")), "Domains cannot tell the domain of x.npz"),
    ],
)
def test_bad_domains_are_refused_in_a_line(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()
