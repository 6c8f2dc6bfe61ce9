"""Texts from CSV files, plain and gzipped, with and without a header."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.data import IID, CSVText, Natural
from lit_fed.data.formats.csv_text import hash_words
from lit_fed.errors import ConfigError

ROWS = ['1,"Who won, and why?"', "0,Rain again", '1,"He said ""go"""', "0,Snow"]


def write(folder: Path, rows: list[str] = ROWS, header: str = "label,text") -> Path:
    text = "\n".join([*([header] if header else []), *rows]) + "\n"
    for split in ("train", "test"):
        with gzip.open(folder / f"{split}.csv.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    return folder


def ready(folder: Path, **kwargs: Any) -> CSVText:
    public_size = kwargs.pop("public_size", 0)
    data = CSVText(root=str(folder), num_clients=1, **({"length": 6} | kwargs))
    data.reserve(public_size)
    data.setup()
    return data


def test_rows_become_token_ids_by_hand(tmp_path: Path) -> None:
    data = ready(write(tmp_path))
    assert (data.num_classes, data.input_shape) == (2, (6,))
    x, y = next(iter(data.test_loader()))
    assert y.tolist() == [1, 0, 1, 0]
    word = {w: 1 + zlib.crc32(w.encode()) % 8191 for w in ("who", "won", ",", "and", "why", "?", "rain", "again", '"')}
    assert x[0].tolist() == [word[w] for w in ("who", "won", ",", "and", "why", "?")]
    assert x[1].tolist() == [word["rain"], word["again"], 0, 0, 0, 0]
    assert x[2].tolist().count(word['"']) == 2
    assert not x.is_floating_point()


def test_hashes_are_the_same_everywhere_and_leave_0_for_padding() -> None:
    assert hash_words("Rain, rain", 100, 8) == [1 + zlib.crc32(w) % 99 for w in (b"rain", b",", b"rain")]
    assert all(1 <= token < 5 for token in hash_words("some words of all kinds, really", 5, 64))


def test_yahoo_answers_has_no_header_counts_from_1_and_spreads_its_text(tmp_path: Path) -> None:
    rows = ['"5","why doesn\'t an optical mouse work","Or even","because"', '"1","a","","b"']
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("\n".join(rows) + "\n")
    data = ready(tmp_path, train_file="train.csv", test_file="test.csv", header=False, label_column=0,
                 text_columns=[1, 2, 3], first_label=1, num_classes=10, length=16)  # fmt: skip
    x, y = next(iter(data.test_loader()))
    assert y.tolist() == [4, 0]
    assert data.num_classes == 10
    assert x[1].tolist()[:2] == hash_words("a b", 8192, 16)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (ROWS, {"label_column": "topic"}, "no column 'topic' \\(label, text\\)"),
        (["one,text"], {}, "line 2: the label is 'one'; it must be a whole number"),
        (["1"], {}, "line 2 has 1 columns"),
        ([], {}, "holds no texts"),
        (ROWS, {"length": 0}, "data.length is 0"),
        (ROWS, {"vocab_size": 1}, "data.vocab_size is 1"),
        (ROWS, {"text_columns": []}, "data.text_columns is empty"),
        (ROWS, {"test_file": "dev.csv"}, "dev.csv does not exist"),
        (ROWS, {"num_classes": 1}, "label 1 of sample 0 is not in 0 … 0"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, rows: list[str], settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ready(write(tmp_path, rows), **settings)


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "train.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        ready(tmp_path)


def test_the_public_set_is_token_ids_without_labels(tmp_path: Path) -> None:
    data = ready(write(tmp_path, ROWS * 10), public_size=10)
    x, index = next(iter(data.public_loader()))
    assert x.shape == (10, 6)
    assert torch.equal(index, torch.arange(10))


def test_a_plain_file_is_found_in_place_of_a_gzipped_one_and_the_other_way_round(tmp_path: Path) -> None:
    """A file of the very name comes first."""
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder in (one, two):
        folder.mkdir()
    write(one)
    for split in ("train", "test"):
        (two / f"{split}.csv").write_text("\n".join(["label,text", *ROWS]) + "\n")
    found = [ready(one, train_file="train.csv", test_file="test.csv"), ready(two), ready(one)]
    first, *others = (next(iter(data.test_loader()))[0] for data in found)
    assert all(torch.equal(first, other) for other in others)
    (one / "test.csv").write_text("label,text\n0,Snow\n")
    assert ready(one, test_file="test.csv").test_loader().num_samples == 1
    assert ready(one).test_loader().num_samples == 4


def test_a_column_of_clients_makes_natural_clients_and_no_other_difference(tmp_path: Path) -> None:
    """Ann wrote rows 0, 1 and 3, Bob row 2; a test row of Eve, who does not train, is in the shared test set alone."""
    rows = ["ann,1,a b", "ann,0,c", "bob,1,d", "ann,0,e f"]
    write(tmp_path, rows, "writer,label,text")
    with gzip.open(tmp_path / "test.csv.gz", "wt", encoding="utf-8") as file:
        file.write("writer,label,text\nbob,1,a\neve,0,b\n")
    data = CSVText(root=str(tmp_path), client_column="writer", length=6)
    data.setup()
    assert data.client_names == ["ann", "bob"]
    assert isinstance(data.partition, Natural)
    assert data.census.class_histogram().tolist() == [[2, 1], [0, 1]]
    assert [data.test_loader(client).num_samples for client in (None, 0, 1)] == [2, 0, 1]
    x, y = data.stored("train", np.arange(4))
    plain = CSVText(root=str(tmp_path), num_clients=1, length=6)
    plain.setup()
    assert (x == plain.stored("train", np.arange(4))[0]).all()
    assert y.tolist() == [1, 0, 1, 0]
    with pytest.raises(ConfigError, match=r"names 2 clients, which data\.partition IID would"):
        CSVText(root=str(tmp_path), client_column="writer", partition=IID(), num_clients=2).setup()


def test_a_row_without_a_client_is_refused_by_its_line(tmp_path: Path) -> None:
    write(tmp_path, ["ann,1,a", " ,0,b"], "writer,label,text")
    with pytest.raises(ConfigError, match=r"train.csv.gz, line 3 has no client; correct or remove the row"):
        CSVText(root=str(tmp_path), client_column="writer").setup()
    with pytest.raises(ConfigError, match=r"no column 'author' \(writer, label, text\); set data.label_column, data"):
        CSVText(root=str(tmp_path), client_column="author").setup()
