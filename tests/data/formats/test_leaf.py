"""LEAF's three sets, in generated files of its form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.data import LEAF
from lit_fed.data.formats.csv_text import hash_words
from lit_fed.data.formats.leaf import LETTERS
from lit_fed.errors import ConfigError


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


def test_no_sample_is_lost_or_doubled(tmp_path: Path) -> None:
    values = np.arange(30) / 64
    write(tmp_path / "a.json", {f"u{user}": ([image(v) for v in values[user::3]], [0] * 10) for user in range(3)})
    data = LEAF("femnist", root=str(tmp_path), test_fraction=0.3)
    data.setup()
    loaders = [*(data.train_loader(client, torch.Generator()) for client in range(3)), data.test_loader()]
    seen = sorted(value for loader in loaders for x, _ in loader for value in x[:, 0, 0, 0].tolist())
    assert seen == values.tolist()
