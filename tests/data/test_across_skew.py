"""Skew of sizes and of inputs, and clients that somebody has listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.data import (
    Brightness,
    Diabetes,
    Digits,
    FeatureSkew,
    Listed,
    LogNormal,
    NoiseLevels,
    Quantity,
    Rotations,
    Samples,
)
from lit_fed.errors import ConfigError
from lit_fed.poses import Puppets
from tests.data.partitions.test_partition import assert_each_once

seeds = st.integers(0, 2**31)


# --- sizes


@given(st.integers(20, 300), st.integers(1, 6), st.floats(0.0, 2.0), seeds)
def test_log_normal_uses_every_sample_once_in_unequal_parts(
    num_samples: int, num_clients: int, sigma: float, seed: int
) -> None:
    csr = LogNormal(sigma, min_samples=1)(Samples(num_samples), num_clients, seed)
    assert_each_once(csr, num_samples)
    assert csr.sizes.min() >= 1
    if sigma == 0:
        assert csr.sizes.max() - csr.sizes.min() <= 1


def test_logarithms_of_log_normal_sizes_have_the_deviation_that_is_asked_for() -> None:
    # ln q_k = σ z_k − ln Σ exp(σ z_j): the last term is the same for all, so the deviation is σ, give or take σ/√(2N).
    for sigma in (0.3, 1.0):
        sizes = LogNormal(sigma, min_samples=1)(Samples(10_000_000), 1000, 0).sizes
        assert np.log(sizes).std() == pytest.approx(sigma, rel=4 / np.sqrt(2000))


@pytest.mark.parametrize("partition", [LogNormal(1.0), Quantity(1.0)])
def test_labels_are_as_in_the_whole_however_large_a_client_is(partition: LogNormal | Quantity) -> None:
    labels = np.arange(40_000) % 4
    csr = partition(Samples.from_strata(labels), 8, 1)
    assert csr.sizes.max() > 2 * csr.sizes.min()
    for client_id in range(8):
        shares = np.bincount(labels[csr[client_id]], minlength=4) / csr.size(client_id)
        # A share of 1/4 among n draws deviates by √(3/16n); five of these are never met by chance.
        assert np.abs(shares - 0.25).max() < 5 * np.sqrt(3 / 16 / csr.size(client_id))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LogNormal(-1.0), "LogNormal.sigma is -1.0; it must be at least 0"),
        (lambda: LogNormal(float("nan")), "LogNormal.sigma is nan"),
        (lambda: LogNormal(min_samples=0), "LogNormal.min_samples is 0"),
        (lambda: LogNormal()(Samples(50), 10, 0), "LogNormal cannot give 10 clients 10 samples each from 50"),
        (
            lambda: LogNormal(50.0, 1, 3)(Samples(50), 40, 0),
            "LogNormal(sigma=50.0) gave some of 40 clients fewer than 1 samples in each of 3 draws (best smallest "
            "client: 0); lower partition.sigma, raise partition.max_retries, or lower partition.min_samples or "
            "data.num_clients",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said(build: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# --- lists


def test_lists_are_the_clients_and_name_their_number() -> None:
    data = Diabetes(partition=Listed([[0, 5, 7], [353, 1]]))
    data.setup()
    assert data.num_clients == 2
    assert [data._ready.train[k].tolist() for k in range(2)] == [[0, 5, 7], [353, 1]]


def test_what_a_run_has_written_down_is_a_partition_again(tmp_path: Path) -> None:
    first = Digits(num_clients=4, partition=Quantity(1.0))
    first.setup()
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(first.record.as_dict()), encoding="utf-8")
    second = Digits(partition=Listed(str(path)))
    second.setup()
    assert second.num_clients == 4
    for client_id in range(4):
        np.testing.assert_array_equal(first._ready.train[client_id], second._ready.train[client_id])


@given(st.lists(st.integers(0, 9), min_size=50, max_size=50), st.integers(0, 20))
def test_clients_hold_what_a_public_set_leaves_of_their_lists(owners: list[int], public_size: int) -> None:
    lists: dict[int, list[int]] = {}
    for sample, owner in enumerate(owners):
        lists.setdefault(owner, []).append(sample)
    plain = Diabetes(num_clients=1)
    data = Diabetes(partition=Listed(list(lists.values())))
    for each in (plain, data):
        each.reserve(public_size=public_size)
    plain.setup()
    public = set(plain._ready.public.tolist())
    if any(set(own) <= public for own in lists.values()):
        with pytest.raises(ConfigError, match="is left to train on"):
            data.setup()
        return
    data.setup()
    assert set(data._ready.public.tolist()) == public
    for client_id, own in enumerate(lists.values()):
        assert set(data._ready.train[client_id].tolist()) == set(own) - public


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[0, 1], [354]], "client 1 names sample 354, and training samples are numbered 0 to 353; correct it"),
        ([[0, 1], [-1]], "client 1 names sample -1, and training samples are numbered 0 to 353; correct it"),
        ([[0, 1], [2, 1]], "sample 1 is listed twice, for client 0 and for client 1; list it once"),
        ([[0, 0]], "sample 0 is listed twice, for client 0 and for client 0; list it once"),
        ([[0], []], "client 1 has no list of samples; give it one number or more"),
        ([[0], [0.5]], "the list of client 1 holds other values than whole numbers; correct it"),
        ([[0], ["a"]], "the list of client 1 holds other values than whole numbers; correct it"),
        ([[0], [True]], "the list of client 1 holds other values than whole numbers; correct it"),
        ([[0], [[1]]], "the list of client 1 holds other values than whole numbers; correct it"),
        ([], "names no client; give a list of sample numbers for each"),
        ({"0": [1], "berlin": [2]}, "has a client 'berlin'; number the 2 clients from 0 on"),
        ({"clients": {"0": {"samples": 3}}}, "client 0 has no list of samples; give it one number or more"),
        (3, "holds no lists; give a list of sample numbers for each client"),
    ],
)
def test_lists_that_are_none_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lists.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    for given_lists in [str(path)] + [content] * isinstance(content, list):
        with pytest.raises(ConfigError) as error:
            Diabetes(partition=Listed(given_lists)).setup()
        named = "Listed.clients[1][0] is " in str(error.value)  # in Python the entry itself
        assert str(error.value).endswith("; it must be a whole number" if named else message)
        assert "\n" not in str(error.value)


def test_files_of_lists_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read \(No such file or directory\); name a JSON file"):
        Listed(str(tmp_path / "gone.json"))
    (tmp_path / "torn.json").write_text("[[1, 2", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"torn\.json is not JSON \(.*\); list numbers per client"):
        Listed(str(tmp_path / "torn.json"))
    with pytest.raises(ConfigError, match=r"has lists for 2 clients, and data\.num_clients is 3; leave the number out"):
        Diabetes(num_clients=3, partition=Listed([[0], [1]])).setup()
    few = Diabetes(partition=Listed([[0], list(range(1, 354))]), max_train_samples=3)
    with pytest.raises(ConfigError, match="none of the 1 samples of client 0 is left to train on"):
        few.setup()


# --- inputs


def batches(data: Any, client_id: int | None) -> list[Any]:
    return list(data.test_loader(client_id))


def of_one_client(skew: FeatureSkew, client_id: int, num_clients: int = 4) -> tuple[Any, Any]:
    """What a client sees, and what it would see without the skew."""
    found = []
    for own in (skew, None):
        data = Digits(num_clients=num_clients, skew=own, test_batch_size=1000)
        data.setup()
        found.append(batches(data, client_id)[0])
    assert torch.equal(found[0][1], found[1][1])
    return found[0][0], found[1][0]


def test_the_variance_of_noise_grows_from_client_to_client_up_to_sigma() -> None:
    # Client i of 4, counted from 0, has σ(i + 1)/4; 90 images of 64 pixels tell a variance to about √(2/5760) = 2 %.
    for client_id in range(4):
        seen, plain = of_one_client(NoiseLevels(sigma=0.8), client_id)
        assert (seen - plain).var().item() == pytest.approx(0.2 * (client_id + 1), rel=0.1)
        assert abs((seen - plain).mean().item()) < 0.05


def test_noise_is_drawn_anew_every_epoch_and_follows_the_seed() -> None:
    def epochs(seed: int) -> list[Any]:
        data = Digits(num_clients=4, skew=NoiseLevels(1.0), batch_size=500)
        data.setup()
        generator = torch.Generator().manual_seed(seed)
        loader = data.train_loader(3, generator)
        return [torch.cat([x.sort(dim=0).values for x, _ in loader]) for _ in range(2)]

    first, second = epochs(0)
    assert not torch.equal(first, second)
    assert torch.equal(first, epochs(0)[0])
    data = Digits(num_clients=4, skew=NoiseLevels(1.0))
    data.setup()
    assert torch.equal(batches(data, 2)[0][0], batches(data, 2)[0][0])  # a test is the same whenever it is run


def test_clients_turn_their_images_in_turn() -> None:
    for client_id, turns in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 0)):
        seen, plain = of_one_client(Rotations(), client_id, num_clients=5)
        assert torch.equal(seen, torch.rot90(plain, turns, (-2, -1)))
    seen, plain = of_one_client(Rotations([45.0]), 0)
    assert seen.shape == plain.shape
    assert not seen[..., 0, 0].any()  # a corner comes from outside


def test_brightness_is_a_gain_and_an_offset() -> None:
    skew = Brightness(offsets=[0.0, 0.5], gains=[1.0, 2.0])
    for client_id, (gain, offset) in enumerate([(1.0, 0.0), (2.0, 0.5), (1.0, 0.0)]):
        seen, plain = of_one_client(skew, client_id)
        assert torch.equal(seen, gain * plain + offset)


def test_shared_sets_stay_as_they_are_and_everything_of_a_clients_own_is_skewed() -> None:
    skewed, plain = (Digits(num_clients=3, skew=own, val_fraction=0.2, seed=1) for own in (Brightness([1.0]), None))
    for data in (skewed, plain):
        data.reserve(public_size=30, calibration_fraction=0.1)
        data.setup()
    for shared in ("test_loader", "val_loader", "public_loader"):
        pairs = zip(getattr(skewed, shared)(), getattr(plain, shared)(), strict=True)
        assert all(torch.equal(a[0], b[0]) for a, b in pairs)
    for own in ("test_loader", "val_loader", "calibration_loader"):
        pairs = zip(getattr(skewed, own)(1), getattr(plain, own)(1), strict=True)
        assert all(torch.equal(a[0], b[0] + 1) for a, b in pairs)
    (ours,), (theirs,) = (list(data.public_loader(client_id=1)) for data in (skewed, plain))
    assert torch.equal(ours[0], theirs[0] + 1)
    assert torch.equal(ours[1], theirs[1])


def test_a_skew_comes_before_a_clients_own_view_and_is_written_down() -> None:
    class Halved(Digits):
        def view(self, client_id: int) -> Any:
            return lambda batch: (batch[0] / 2, batch[1])

    data = Halved(num_clients=2, skew=Brightness([1.0, 3.0]))
    data.setup()
    plain = Digits(num_clients=2)
    plain.setup()
    for client_id, offset in ((0, 1), (1, 3)):
        for seen, own in zip(batches(data, client_id), batches(plain, client_id), strict=True):
            assert torch.equal(seen[0], (own[0] + offset) / 2)
    assert data.describe(1)["skew"] == {"gain": 1.0, "offset": 3.0}
    assert Rotations().describe(5, 9) == {"angle": 90.0}
    assert NoiseLevels(0.5).describe(0, 5) == {"noise_variance": 0.1}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NoiseLevels(-0.1), "NoiseLevels.sigma is -0.1; it must be at least 0"),
        (lambda: NoiseLevels(float("inf")), "NoiseLevels.sigma is inf"),
        (lambda: Rotations([]), "Rotations.angles is []; it must be one finite number or more"),
        (lambda: Rotations([float("nan")]), "Rotations.angles is [nan]; it must be one finite number or more"),
        (lambda: Brightness([0.0], [1.0, 2.0]), "Brightness.gains has 2 values and offsets has 1; give equally many"),
        (lambda: Brightness([0.0], [0.0]), "Brightness.gains is [0.0]; every gain must be above 0"),
    ],
)
def test_settings_of_a_skew(build: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)


def test_inputs_that_cannot_be_changed_are_named() -> None:
    data: Any = Diabetes(num_clients=2, skew=Rotations([90.0]))
    data.setup()
    with pytest.raises(ConfigError, match=r"Rotations needs images, and an input has shape \(10,\); leave it out"):
        batches(data, 0)
    data = Puppets(num_clients=3, samples_per_client=2, test_samples=2, skew=NoiseLevels(1.0))
    data.setup()
    with pytest.raises(ConfigError, match="NoiseLevels needs inputs of one floating-point tensor, and these are"):
        batches(data, 0)
