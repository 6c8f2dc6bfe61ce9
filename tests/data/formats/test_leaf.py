"""LEAF's three sets, in generated files of its form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2.functional import normalize, resize

from lit_fed.command.cli import main
from lit_fed.data import LEAF, Dirichlet
from lit_fed.data.formats.csv_text import hash_words
from lit_fed.data.formats.leaf import LETTERS
from lit_fed.errors import ConfigError
from tests.support import ROOT, rows


def write(path: Path, samples: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in samples.items()}
    content = {"users": list(samples), "num_samples": [len(y) for _, y in samples.values()], "user_data": data}
    path.write_text(json.dumps(content), encoding="utf-8")


def image(value: float) -> list[float]:
    return [value, *[1.0] * 783]


def femnist(root: Path) -> Path:
    write(root / "train" / "a.json", {"f2": ([image(0.25), image(0.5)], [61, 0]), "f10": ([image(0.75)], [10])})
    write(root / "train" / "b.json", {"f1": ([image(0.0)], [36]), "idle": ([], [])})
    write(root / "test" / "a.json", {"f10": ([image(0.1)], [10]), "new": ([image(0.2)], [1])})
    return root


def test_writers_of_femnist_are_clients_with_their_images(tmp_path: Path) -> None:
    data = LEAF("femnist", root=str(femnist(tmp_path)))
    assert (data.num_classes, data.input_shape, data.num_clients) == (62, (1, 28, 28), 3)
    assert data.client_names == ["f1", "f10", "f2"]
    assert data.class_names is not None
    assert [data.class_names[label] for label in (0, 9, 10, 35, 36, 61)] == ["0", "9", "A", "Z", "a", "z"]
    data.setup()
    assert [data.census.class_counts(client).nonzero()[0].tolist() for client in range(3)] == [[36], [10], [0, 61]]
    (x, y), *_ = data.train_loader(2, torch.Generator())
    assert sorted(zip(x[:, 0, 0, 0].tolist(), y.tolist(), strict=True)) == [(0.25, 61), (0.5, 0)]
    assert x[0, 0, 27].tolist() == [1.0] * 28
    assert [data.test_loader(client).num_samples for client in range(3)] == [0, 1, 0]
    assert data.test_loader().num_samples == 2  # with the writer who does not train


def published(root: Path, users: int = 4, images: int = 12) -> Path:
    """Writers as LEAF's ``preprocess.sh -s niid -k 0 -t sample`` leaves them: its file names, and white as 1."""
    drawn = np.random.default_rng(0)
    for part, count in (("train", images), ("test", 2)):
        samples = {}
        for user in range(users):
            pixels = drawn.integers(0, 256, (count, 784)) / 255
            samples[f"f{user:04}_{user + 10:02}"] = (pixels.tolist(), drawn.integers(0, 62, count).tolist())
        write(root / part / f"all_data_0_niid_0_keep_0_{part}_9.json", samples)
    return root


def test_images_are_normalised_and_scaled_as_torchvision_does(tmp_path: Path) -> None:
    root = published(tmp_path)
    content = json.loads((root / "test" / "all_data_0_niid_0_keep_0_test_9.json").read_text())
    pixels = np.array([image for user in content["users"] for image in content["user_data"][user]["x"]])
    expected = normalize(torch.from_numpy(pixels).float().view(-1, 1, 28, 28), [0.1736], [0.3317])
    for size in (28, 56, 20):
        data = LEAF("femnist", root=str(root), image_size=size, mean=[0.1736], std=[0.3317])
        data.setup()
        (x, _), *_ = data.test_loader()
        assert data.input_shape == tuple(x.shape[1:]) == (1, size, size)
        torch.testing.assert_close(x, resize(expected, [size, size], antialias=True), atol=1e-5, rtol=0)
        steps = data.preprocessing()
        assert steps is not None
        assert [step["step"] for step in steps] == ["normalize", "resize"]


def test_writers_images_can_be_cut_by_class_over_other_clients(tmp_path: Path) -> None:
    root, cut = str(published(tmp_path, images=30)), Dirichlet(alpha=0.5, cap=False)
    with pytest.raises(ConfigError, match=r"partition Dirichlet would ignore; .*data\.by_user to false"):
        LEAF("femnist", root=root, num_clients=3, partition=cut).setup()
    data = LEAF("femnist", root=root, by_user=False, num_clients=3, partition=cut)
    data.setup()
    assert data.client_names is None
    assert sum(data.census.num_samples(client) for client in range(3)) == 4 * 30
    assert data.test_loader().num_samples == 4 * 2


@pytest.mark.parametrize(("config", "clients"), [("femnist", 10), ("femnist_writers", 40)])
def test_fedfrozens_configurations_run_on_files_as_leaf_writes_them(
    config: str, clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "data" / "leaf" / "femnist" / "data", users=40)
    network = {"img_size": 32, "embed_dim": 12, "depth": 1, "num_heads": 1}
    method = "papers/fedfrozen/tuned/fedfrozen"
    files = (f"papers/fedfrozen/runs/{config}", method)
    words = [word for file in files for word in ("-c", str(ROOT / "configs" / f"{file}.yaml"))]
    small = {"network": "vit_tiny_patch16_224", "network_args": json.dumps(network)}
    words += [f"--model.init_args.{key}={value}" for key, value in small.items()]
    run = {"max_rounds": 6, "local_epochs": 1, "accelerator": "cpu", "devices": 1, "num_threads": 1}
    words += [f"--trainer.{key}={value}" for key, value in run.items()]
    main(["fit", *words, "--data.init_args.image_size=32"])
    folder = tmp_path / "lightning_logs" / "version_0"
    partition = json.loads((folder / "partition.json").read_text())
    assert len(partition["clients"]) == clients
    assert len(rows(folder / "metrics.csv")) == 6  # queries and keys freeze after five


def test_roles_of_shakespeare_give_characters(tmp_path: Path) -> None:
    line = "to be, or not to be~".rjust(80)
    write(
        tmp_path / "all_data" / "all_data.json",
        {"HAMLET": ([line] * 10, ["T"] * 10), "GHOST": ([line] * 5, ["\n"] * 5)},
    )
    data = LEAF("shakespeare", root=str(tmp_path))
    data.setup()
    assert (data.num_classes, data.vocab_size, data.client_names) == (80, 81, ["GHOST", "HAMLET"])
    (x, y), *_ = data.train_loader(1, torch.Generator())
    assert x[0].tolist() == [0 if letter == "~" else LETTERS.index(letter) + 1 for letter in line]
    assert set(y.tolist()) == {LETTERS.index("T")}
    assert [data.census.num_samples(client) for client in range(2)] == [4, 8]
    assert data.test_loader().num_samples == 3


def test_users_of_sent140_give_tweets(tmp_path: Path) -> None:
    row = ["1467", "Mon Apr 06", "NO_QUERY", "ann", "Is upset, again!", "training"]
    write(tmp_path / "train" / "a.json", {"ann": ([row, row], [0, "4"]), "bob": ([row], [1])})
    write(tmp_path / "test" / "a.json", {"ann": ([row], [0])})
    data = LEAF("sent140", root=str(tmp_path), length=6, tokens=100)
    data.setup()
    (x, y), *_ = data.train_loader(0, torch.Generator())
    assert x[0].tolist() == [*hash_words(row[4], 100, 6), 0]
    assert sorted(y.tolist()) == [0, 1]
    assert data.class_names == ["negative", "positive"]


@pytest.mark.parametrize(
    ("name", "samples", "message"),
    [
        ("femnist", {"u": ([[0.5] * 783], [0])}, "user u, sample 0: x is not 784 numbers from 0 to 1; correct it"),
        ("femnist", {"u": ([[255.0] * 784], [0])}, "x is not 784 numbers from 0 to 1"),
        ("femnist", {"u": (["text"], [0])}, "x is not 784 numbers from 0 to 1"),
        ("femnist", {"u": ([[float("nan")] * 784], [0])}, "x is not 784 numbers from 0 to 1"),
        ("femnist", {"u": ([image(0.0)], [62])}, "y is 62; it must be 0 to 61"),
        ("femnist", {"u": ([image(0.0)], [True])}, "y is True; it must be 0 to 61"),
        ("femnist", {"u": ([image(0.0)], [])}, "user 'u' has no lists x and y of one length"),
        ("femnist", {"u": ([], [])}, "has no user with samples; sample the set anew"),
        ("shakespeare", {"u": (["short"], ["a"])}, "x is not a text of 80 characters; correct it"),
        ("shakespeare", {"u": (["a" * 80], ["~"])}, "y is '~'; it must be one of LEAF's 80 characters"),
        ("sent140", {"u": (["a tweet"], [0])}, "x is not a list with a tweet's text in place 4; correct it"),
        ("sent140", {"u": ([["1"] * 6], [2])}, "y is 2; it must be 0 to 1"),
    ],
)
def test_malformed_samples_are_named(name: Any, samples: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "a.json", samples)
    with pytest.raises(ConfigError, match=re.escape(message)):
        LEAF(name, root=str(tmp_path)).setup()


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    for content, message in (
        ("{", "a.json cannot be read"),
        ("[]", "a.json has no users and user_data, as LEAF's files have"),
        ('{"users": ["u"], "user_data": {}}', "user 'u' has no lists x and y of one length"),
        ('{"users": [["u"]], "user_data": {}}', "user ['u'] has no lists x and y"),
    ):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ConfigError, match=re.escape(message)):
            LEAF("femnist", root=str(tmp_path)).setup()
    write(tmp_path / "a.json", {"u": ([image(0.0)], [1])})
    write(tmp_path / "b.json", {"u": ([image(0.0)], [1])})
    with pytest.raises(ConfigError, match="user 'u' is also in another file; remove one"):
        LEAF("femnist", root=str(tmp_path)).setup()
    with pytest.raises(ConfigError, match=r"holds no \.json file; set data\.root to the folder data that LEAF's"):
        LEAF("femnist", root=str(tmp_path / "none")).setup()
    with pytest.raises(ConfigError, match=r"data\.name is 'reddit'; it must be"):
        LEAF("reddit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sent140", {"image_size": 32}, "data.image_size is a setting of images, and sent140 is text; leave it out"),
        ("shakespeare", {"mean": [0.5], "std": [1.0]}, "data.mean is a setting of images, and shakespeare is text"),
        ("femnist", {"mean": [0.5]}, "data.mean and data.std belong together; give both or neither"),
        ("femnist", {"mean": [0.5] * 3, "std": [1.0] * 3}, "data.mean has 3 values, but inputs have 1 channels"),
        ("femnist", {"image_size": 0}, "Resize.size is 0; it must be at least 1 pixels"),
    ],
)
def test_settings_of_images_are_checked(name: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LEAF(name, **settings)


def test_no_sample_is_lost_or_doubled(tmp_path: Path) -> None:
    values = np.arange(30) / 64
    write(tmp_path / "a.json", {f"u{user}": ([image(v) for v in values[user::3]], [0] * 10) for user in range(3)})
    data = LEAF("femnist", root=str(tmp_path), test_fraction=0.3)
    data.setup()
    loaders = [*(data.train_loader(client, torch.Generator()) for client in range(3)), data.test_loader()]
    seen = sorted(value for loader in loaders for x, _ in loader for value in x[:, 0, 0, 0].tolist())
    assert seen == values.tolist()
