"""Sets that the library `datasets` itself has written: counts against pandas, inputs against the cells, refusals."""

from __future__ import annotations

import io
import json
import pickle
import re
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies
from PIL import Image
from scipy.io import wavfile

from lit_fed.command.start import main
from lit_fed.data import Continuous, Dirichlet, Grouped, HuggingFace, Natural
from lit_fed.data.formats.csv_text import hash_words
from lit_fed.data.formats.hugging_face import join_small
from lit_fed.errors import ConfigError
from tests.support import assert_same, run_cli, saved_weights

pd = pytest.importorskip("pandas")
datasets = pytest.importorskip("datasets")
ROWS, WRITERS = 120, 7


def wav(values: np.ndarray, rate: int = 100) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, rate, values)
    return file.getvalue()


def table(rows: int = ROWS) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (rows, 9, 9), dtype=np.uint8)
    return {
        "image": [Image.fromarray(image) for image in images],
        "pixels": images.tolist(),
        "label": rng.integers(0, 3, rows).tolist(),
        "writer": [f"w{number}" for number in rng.choice(WRITERS, rows, p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.03, 0.02])],
        "title": [f"Word {row}" for row in range(rows)],
        "body": ["some more, of it"] * rows,
        "kind": [("red", "green", "blue")[row % 3] for row in range(rows)],
        "age": rng.normal(size=rows).tolist(),
        "count": list(range(rows)),
        "wave": [rng.normal(size=3 + row % 4).tolist() for row in range(rows)],
        "pair": rng.normal(size=(rows, 2)).tolist(),
        "sound": [
            {"bytes": wav(rng.integers(-9999, 9999, 50 + row).astype(np.int16)), "path": f"{row}.wav"}
            for row in range(rows)
        ],
        "gap": [None if row == 5 else "a" for row in range(rows)],
        "bare": [-1 if row == 3 else 1 for row in range(rows)],
        "broken": [{"bytes": b"no image", "path": None}] * rows,
        "hole": [None if row == 7 else 1.0 for row in range(rows)],
        "nan": [float("nan")] * rows,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame, Any]:
    """The set, its folder, and its cells as a data frame."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "pixels": datasets.Array2D((9, 9), "uint8"),
            "label": datasets.ClassLabel(names=["x", "y", "z"]),
            "bare": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    cells = table()
    try:
        whole = datasets.Dataset.from_dict({key: cells[key] for key in features}, features=features)
    except pickle.PicklingError:
        pytest.skip("dill pickles whole packages that lie outside of site-packages, and fails")
    rest = datasets.Dataset.from_dict({key: column for key, column in cells.items() if key not in features})
    whole = datasets.concatenate_datasets([whole, rest], axis=1)
    whole = whole.cast_column("sound", datasets.Audio(sampling_rate=100)).cast_column("broken", datasets.Image())
    folder = tmp_path_factory.mktemp("set")
    datasets.disable_progress_bars()
    splits = datasets.DatasetDict({"train": whole, "test": whole.select(range(40)), "val": whole.select(range(40, 60))})
    splits.save_to_disk(str(folder / "saved"))
    (folder / "parquet").mkdir()
    plain = whole.select_columns(["title", "kind", "writer", "age", "count"])
    plain.to_parquet(str(folder / "parquet" / "train-00000-of-00001.parquet"))
    frame = pd.DataFrame({key: cells[key] for key in ("label", "writer", "kind", "age", "count")})
    return folder, frame, whole


def ready(folder: Path, inputs: str | list[str], target: str | list[str], **kwargs: Any) -> HuggingFace:
    data = HuggingFace(str(folder / "saved"), inputs, target, **kwargs)
    data.setup()
    return data


def everything(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*loader, strict=True)
    return torch.cat(xs), torch.cat(ys)


# ---------------------------------------------------------------------- clients and counts


def test_counts_by_client_and_class_are_those_of_pandas(made: Any) -> None:
    folder, frame, _ = made
    data = ready(folder, "image", "label", client="writer", test_split="test", image_size=8)
    expected = pd.crosstab(frame["writer"], frame["label"])
    assert data.client_names == list(expected.index)
    assert data.class_names == ["x", "y", "z"]
    assert data.census.class_histogram().tolist() == expected.to_numpy().tolist()
    tested = frame[:40].groupby("writer").size().reindex(expected.index, fill_value=0)
    assert [data.test_loader(client).num_samples for client in range(data.num_clients)] == tested.tolist()
    assert isinstance(data.partition, Natural)


def test_a_fraction_of_every_client_is_tested_on_and_nothing_is_lost(made: Any) -> None:
    folder, frame, _ = made
    data = ready(folder, "count", "kind", client="writer", test_fraction=0.25)
    sizes = frame.groupby("writer").size()
    train = [everything(data.train_loader(client, torch.Generator()))[0] for client in range(data.num_clients)]
    test = [data.test_loader(client) for client in range(data.num_clients)]
    assert [len(rows) for rows in train] == [size - size // 4 for size in sizes]
    assert [loader.num_samples for loader in test] == [size // 4 for size in sizes]
    rows = torch.cat([*train, *(everything(loader)[0] for loader in test if loader.num_samples)])
    assert sorted(rows.flatten().tolist()) == list(range(ROWS))
    for client, name in enumerate(sizes.index):
        assert set(frame["writer"][train[client].flatten().int().tolist()]) == {name}


def test_clients_to_test_on_do_not_train(made: Any) -> None:
    folder, frame, _ = made
    data = ready(folder, "count", "kind", client="writer", test_by="clients", test_fraction=0.3)
    assert data.num_clients == WRITERS - round(0.3 * WRITERS)
    rows, _ = everything(data.test_loader())
    tested = set(frame["writer"][rows.flatten().int().tolist()])
    assert tested.isdisjoint(data.client_names or [])
    assert len(rows) == frame["writer"].isin(tested).sum()
    assert tested | set(data.client_names or []) == set(frame["writer"])


def test_the_two_smallest_clients_are_joined_until_all_are_large_enough() -> None:
    # 1 + 2 = 3, then 3 + 3 = 6 (client 1 with the first two), 5 alone, 9 alone: all at least 5.
    assert join_small(np.array([1, 3, 5, 2, 9]), 5, 5).tolist() == [0, 0, 1, 0, 2]
    # Down to two: the group of 6 and the client of 5 are the smallest of three.
    assert join_small(np.array([1, 3, 5, 2, 9]), 1, 2).tolist() == [0, 0, 0, 0, 1]
    assert join_small(np.array([4, 4, 4]), 4, 3).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"data\.least_samples is 13; it must be at most 12"):
        join_small(np.array([4, 4, 4]), 13, 3)


@given(strategies.lists(strategies.integers(1, 50), min_size=1, max_size=60), strategies.data())
def test_joined_clients_are_large_enough_and_no_more_are_joined_than_needed(sizes: list[int], data: Any) -> None:
    least = data.draw(strategies.integers(1, sum(sizes)))
    most = data.draw(strategies.integers(1, len(sizes)))
    group = join_small(np.array(sizes), least, most)
    held = np.bincount(group, sizes)
    assert sorted(set(group)) == list(range(len(held)))
    assert len(held) <= most
    assert held.min() >= least
    first = np.unique(group, return_index=True)[1]
    assert first.tolist() == sorted(first)
    if max(np.bincount(group)) > 1 and len(held) < most:  # the last join was of a client below the bound
        assert min(sizes) < least


def test_joined_clients_hold_their_own_clients_samples(made: Any) -> None:
    folder, frame, _ = made
    data = ready(folder, "count", "kind", client="writer", least_samples=15, test_split="test")
    sizes = frame.groupby("writer").size()
    group = join_small(sizes.to_numpy(), 15, len(sizes))
    assert data.census.class_histogram().sum(axis=1).tolist() == np.bincount(group, sizes).tolist()
    assert min(np.bincount(group, sizes)) >= 15
    names = data.client_names or []
    assert [name.split(" ")[0] for name in names] == [sizes.index[at] for at in np.unique(group, return_index=True)[1]]
    few = ready(folder, "count", "kind", client="writer", clients=2, test_split="test")
    assert few.num_clients == 2
    pairs = ready(folder, "count", "kind", client="writer", partition=Grouped(2))
    assert pairs.num_clients == -(-WRITERS // 2)


def test_other_partitions_cut_a_set_without_a_client_column(made: Any) -> None:
    folder, frame, _ = made
    data = ready(folder, "count", "kind", num_clients=4, partition=Dirichlet(0.5, min_samples=2), test_split="test")
    assert data.census.class_histogram().sum(axis=0).tolist() == frame["kind"].value_counts().sort_index().tolist()
    assert data.class_names == ["blue", "green", "red"]
    ordered = ready(folder, "age", "count", kind="numbers", num_clients=3, partition=Continuous(strictness=1.0))
    ranges = [ordered.target_values(ordered._ready.train[client]) for client in range(3)]
    assert all(first.max() < second.min() for first, second in pairwise(ranges))


# ---------------------------------------------------------------------- inputs


def test_inputs_are_the_cells(made: Any) -> None:
    folder, _, _ = made
    cells = table()
    args: dict[str, Any] = {"test_split": "test", "num_clients": 2}
    x, y = everything(ready(folder, "image", "label", image_size=9, grayscale=True, **args).test_loader())
    assert torch.equal((x[:, 0] * 255).round().int(), torch.tensor(cells["pixels"][:40], dtype=torch.int32))
    assert y.tolist() == cells["label"][:40]
    x, y = everything(ready(folder, "pixels", "label", mean=[100.0], std=[50.0], **args).test_loader())
    assert torch.allclose(x, (torch.tensor(cells["pixels"][:40]).float() - 100) / 50, atol=1e-5)
    x, _ = everything(ready(folder, ["title", "body"], "kind", length=6, **args).test_loader())
    assert x[3].tolist() == hash_words("Word 3 some more, of it", 8192, 6)
    x, y = everything(ready(folder, ["age", "count"], "pair", **args).test_loader())
    assert torch.allclose(x, torch.tensor(list(zip(cells["age"][:40], cells["count"][:40], strict=True))).float())
    assert torch.allclose(y, torch.tensor(cells["pair"][:40]).float())
    x, _ = everything(ready(folder, "wave", ["age", "count"], length=4, kind="numbers", **args).test_loader())
    assert torch.allclose(x[0, 0], torch.tensor([*cells["wave"][0], 0.0]).float())  # of three values
    assert torch.allclose(x[3, 0], torch.tensor(cells["wave"][3][:4]).float())  # of six
    x, _ = everything(ready(folder, "sound", "kind", length=60, **args).test_loader())
    _, stored = wavfile.read(io.BytesIO(cells["sound"][0]["bytes"]))
    assert torch.allclose(x[0, 0], torch.from_numpy(np.append(stored / 2**15, np.zeros(10))).float())
    assert x.shape == (40, 1, 60)


def test_gaps_and_categories_are_those_of_pandas() -> None:
    """Medians are over the training rows of all clients; a category's last input is 1 for all but its levels."""
    rng = np.random.default_rng(1)
    ages: list[Any] = [None if row % 7 == 0 else float(age) for row, age in enumerate(rng.normal(60, 9, ROWS).round(1))]
    counts: list[Any] = [None if row % 11 == 3 else int(count) for row, count in enumerate(rng.integers(0, 9, ROWS))]
    wards: list[Any] = [("icu", "surgery", "attic", None)[ward] for ward in rng.integers(0, 4, ROWS)]
    cells = {"age": ages, "ward": wards, "sex": rng.integers(0, 2, ROWS).tolist(), "count": counts}
    cells |= {"stay": rng.normal(size=ROWS).tolist(), "back": rng.integers(0, 2, ROWS).tolist()}
    whole = datasets.Dataset.from_dict(cells).cast_column("sex", datasets.ClassLabel(names=["f", "m"]))
    test = whole.select(range(40))
    inputs, levels = ["age", "ward", "sex", "count", "stay"], {"ward": ["surgery", "icu"], "sex": ["m"]}
    usual: dict[str, Any] = {"inputs": inputs, "target": "back", "levels": levels, "num_clients": 3}
    data = HuggingFace({"train": whole, "test": test}, impute="median", test_split="test", **usual)
    data.setup()
    frame = pd.DataFrame(cells)
    filled = frame[["age", "count"]].fillna(frame[["age", "count"]].median())
    marks = [
        frame["age"].isna(),
        frame["ward"] == "surgery",
        frame["ward"] == "icu",
        ~frame["ward"].isin(["surgery", "icu"]),
    ]
    marks += [frame["sex"] == 1, frame["sex"] == 0, frame["count"].isna()]
    wanted = np.column_stack([filled["age"], filled["count"], frame["stay"], *marks])
    x, _ = everything(data.test_loader())
    torch.testing.assert_close(x, torch.tensor(wanted[:40].astype(np.float32)))
    assert data.input_shape == (10,)
    assert data.stored_like()[0] == (5,)
    encode, _ = data.preprocessing() or []
    assert encode["fill"] == [frame["age"].median(), None, None, frame["count"].median(), None]
    held_out = HuggingFace({"train": whole}, impute="median", **usual)
    held_out.setup()
    (encode, _), rows = held_out.preprocessing() or [], held_out.columns.x
    assert encode["fill"][0] == frame["age"].iloc[rows].median() != frame["age"].median(), "of training rows alone"

    given: dict[str, Any] = {"impute": {"age": 50.0, "count": 2.0}, "mean": [60.0, 0.0, 0.0], "std": [9.0, 1.0, 2.0]}
    data = HuggingFace({"train": whole, "test": test}, test_split="test", **usual | given)
    data.setup()
    x, _ = everything(data.test_loader())
    assert x[0, 0] == pytest.approx((50 - 60) / 9)
    assert x[3, 1] == 2.0
    torch.testing.assert_close(x[:, 2:], torch.tensor(np.column_stack([wanted[:40, 2] / 2, wanted[:40, 3:]])).float())
    assert "data.impute takes medians" in str(HuggingFace({"train": whole}, impute="median", **usual).pooled())
    with pytest.raises(ConfigError, match=r"row \d+: 'count' is empty; correct or remove the row, or set "):
        read_all({"name": {"train": whole}, **usual, "impute": {"age": 50.0}})


def test_new_inputs_are_arrays_or_images_in_files(made: Any, tmp_path: Path) -> None:
    folder, _, _ = made
    np.save(tmp_path / "new.npy", np.array([[1.0, 2.0]], dtype=np.float32))
    numbers = ready(folder, ["age", "count"], "kind", mean=[1.0, 0.0], std=[2.0, 4.0])
    (batch,) = numbers.new_inputs(tmp_path / "new.npy").loader
    assert batch.tolist() == [[0.0, 0.5]]
    table()["image"][0].save(tmp_path / "new.png")
    images = ready(folder, "image", "label", image_size=9, grayscale=True)
    (batch,) = images.new_inputs(tmp_path / "new.png").loader
    assert torch.equal((batch[0, 0] * 255).round().int(), torch.tensor(table()["pixels"][0]).int())
    with pytest.raises(ConfigError, match="reads no images from files"):
        numbers.new_inputs(tmp_path / "new.png")


def test_a_validation_split_and_augmented_training_images(made: Any) -> None:
    folder, _, _ = made
    data = ready(folder, "image", "label", test_split="test", val_split="val", client="writer", horizontal_flip=True,
                 image_size=9, grayscale=True)  # fmt: skip
    assert data.val_loader().num_samples == 20
    plain = everything(data.val_loader())[0]
    assert torch.equal((plain[0, 0] * 255).round().int(), torch.tensor(table()["pixels"][40]).int())
    first = everything(data.train_loader(0, torch.Generator().manual_seed(1)))[0]
    again = everything(data.train_loader(0, torch.Generator().manual_seed(1)))[0]
    assert torch.equal(first, again)


def test_worker_processes_give_the_same_batches(made: Any) -> None:
    folder, _, _ = made
    alone, workers = (
        ready(folder, "image", "label", client="writer", image_size=8, num_workers=count) for count in (0, 2)
    )
    for client in (0, 3):
        mine, theirs = (
            everything(data.train_loader(client, torch.Generator().manual_seed(3))) for data in (alone, workers)
        )
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    assert alone.record.contents.is_of(workers.record.contents)
    workers.teardown("fit")


def test_texts_are_cut_by_a_tokenizer_from_a_folder(made: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "3"]))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(str(tmp_path / "folder"))
    folder, _, _ = made
    data = ready(folder, "title", "kind", tokenizer=str(tmp_path / "folder"), test_split="test", length=6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "folder"))
    wanted = tokenizer("Word 3", truncation=True, max_length=6)["input_ids"]
    assert everything(data.test_loader())[0][3].tolist() == wanted + [0] * (6 - len(wanted))
    assert data.vocab_size == 8192


# ---------------------------------------------------------------------- places


def test_a_folder_of_parquet_files_is_copied_to_the_cache_and_read_from_it_by_name(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network is not to be used"))
    folder, frame, _ = made
    read: dict[str, Any] = {"inputs": "title", "target": "kind", "client": "writer", "cache": str(tmp_path)}
    data = HuggingFace(str(folder / "parquet"), split="train[:50%]", **read)
    data.setup()
    assert data.client_names == sorted(frame["writer"][:60].unique())
    cached = HuggingFace("parquet", **read | {"inputs": "age"})  # the builder's name: refused below
    with pytest.raises(ConfigError, match=r"data\.name 'parquet' cannot be read"):
        cached.setup()
    monkeypatch.chdir(tmp_path)
    renamed = HuggingFace("nobody/nothing", **read)
    with pytest.raises(
        ConfigError,
        match=r"is neither a folder nor in the cache here; set data\.download to true, or run load_dataset\(",
    ):
        renamed.setup()


def test_a_set_in_python_is_taken_as_it_is_and_a_streamed_one_is_refused(made: Any) -> None:
    _, frame, whole = made
    data = HuggingFace({"train": whole.select(np.flatnonzero(frame["label"] != 2))}, "count", "kind", client="writer")
    data.setup()
    assert len(data._ready.train.indices) + data.test_loader().num_samples == (frame["label"] != 2).sum()
    streamed = HuggingFace({"train": whole.to_iterable_dataset()}, "count", "kind")
    with pytest.raises(ConfigError, match="is streamed, and clients cannot be cut from samples without numbers"):
        streamed.setup()


def test_importing_the_data_does_not_import_the_library() -> None:
    code = "import sys, lit_fed.data; assert 'datasets' not in sys.modules and 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


SPARSE = r"""
import json, resource, sys
import numpy as np, pyarrow as pa, torch
from datasets import Dataset
folder, batches, rows = sys.argv[1], int(sys.argv[2]), 4096
first = Dataset.from_dict({"x": [[0.0] * 4096], "label": [0], "who": [0]})
first.save_to_disk(folder)
(name,) = [entry["filename"] for entry in json.load(open(folder + "/state.json"))["_data_files"]]
schema = pa.ipc.open_stream(folder + "/" + name).schema
zeros = pa.array(np.zeros(rows * 4096, np.float64))
class Sparse:  # leaves holes in place of zeros
    def __init__(self, path): self.file, self.closed, self.at = open(path, "wb"), False, 0
    def write(self, data):
        data = memoryview(data)
        if data.nbytes > 2**20:
            self.file.seek(data.nbytes - 1, 1); self.file.write(b"\0")
        else: self.file.write(data)
        self.at += data.nbytes
        return data.nbytes
    def tell(self): return self.at
    def flush(self): self.file.flush()
    def close(self): self.closed = True; self.file.close()
    def writable(self): return True
    def readable(self): return False
    def seekable(self): return False
x = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * 4096), zeros)
with pa.ipc.new_stream(pa.PythonFile(Sparse(folder + "/" + name), mode="w"), schema) as writer:
    for number in range(batches):
        values = np.arange(rows) + number
        writer.write_batch(pa.record_batch([x, pa.array(values % 10), pa.array(values % 50)], schema=schema))
"""
READ = r"""
import os, resource, sys
from lit_fed.data import HuggingFace
import datasets, torch
def high(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
data = HuggingFace(sys.argv[1], "x", "label", client="who", batch_size=32)
before = high()
data.setup()
after = high()
for client in range(20):
    x, y = next(iter(data.train_loader(client, torch.Generator())))
print(before, after, high(), len(data._ready.train.indices), tuple(x.shape))
"""


@pytest.mark.parametrize("batches", [4, pytest.param(240, marks=pytest.mark.long)])
def test_memory_does_not_grow_with_a_set_larger_than_memory(made: Any, batches: int, tmp_path: Path) -> None:
    """240 batches of 4,096 rows of 4,096 doubles are 32 GB, all but their labels and clients holes in the file."""
    subprocess.run([sys.executable, "-c", SPARSE, str(tmp_path / "set"), str(batches)], check=True)
    (file,) = (tmp_path / "set").glob("*.arrow")
    assert file.stat().st_size > batches * 4096 * 4096 * 8
    out = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "set")], check=True, capture_output=True, text=True
    )
    before, after, batched, samples = map(float, out.stdout.split()[:4])
    rows = batches * 4096
    assert 0.8 * rows <= samples <= 0.8 * rows + 50  # a fifth of each of 50 clients is held out, rounded down
    # Columns of whole numbers, a handful of copies of 8 bytes a row; a batch has 1 MB.
    assert after - before < 60 + rows * 8 * 20 / 2**20, out.stdout
    assert batched - after < 60, out.stdout


# ---------------------------------------------------------------------- a federation by configuration alone


def test_a_federation_runs_by_configuration_alone(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, frame, _ = made
    root = Path(__file__).parents[3] / "configs"
    files = ["-c", str(root / "quickstart.yaml"), "-c", str(root / "data" / "hugging_face.yaml")]
    short = ["--trainer.max_rounds", "2", "--trainer.default_root_dir", str(tmp_path), "--data.num_workers", "0",
             "--data.val_fraction", "0"]  # fmt: skip
    main(["fit", *files, "--data.name", str(folder / "saved"), *short, "--trainer.participation", "null"])
    assert capsys.readouterr().err == ""
    run = tmp_path / "lightning_logs" / "version_0"
    rows = json.loads((run / "partition.json").read_text())["clients"].values()
    sizes = frame.groupby("writer").size()
    group = join_small(sizes.to_numpy(), 10, len(sizes))
    held = [sum(size - size // 5 for size in [np.bincount(group, sizes)[at]]) for at in range(group.max() + 1)]
    assert [len(row["indices"]) for row in rows] == held


@pytest.mark.long
def test_two_processes_and_a_resumed_run_give_the_weights_of_one(made: Any, tmp_path: Path) -> None:
    folder, _, _ = made
    root = Path(__file__).parents[3] / "configs"
    files = ["-c", str(root / "quickstart.yaml"), "-c", str(root / "data" / "hugging_face.yaml")]
    words = ["fit", *files, "--data.name", str(folder / "saved"), "--data.horizontal_flip", "true"]

    def run(name: str, *more: str) -> dict[str, torch.Tensor]:
        place = ["--trainer.default_root_dir", str(tmp_path / name), "--trainer.participation", "FullParticipation"]
        done = run_cli(*words, *place, *more, cwd=tmp_path)
        if "needs datasets" in done.stderr:
            pytest.skip("datasets lies on this process's path alone")
        assert done.returncode == 0, done.stderr
        return saved_weights(tmp_path / name / "lightning_logs" / "version_0")

    alone = run("alone", "--trainer.max_rounds", "2")
    assert_same(alone, run("both", "--trainer.max_rounds", "2", "--trainer.devices", "2"))
    run("resumed", "--trainer.max_rounds", "1")
    assert_same(alone, run("resumed", "--trainer.max_rounds", "2", "--ckpt_path", "last"))


def test_some_clients_only_have_the_batches_of_the_whole_population(made: Any) -> None:
    folder, _, _ = made
    args: dict[str, Any] = {"client": "writer", "least_samples": 10, "image_size": 8}
    whole = ready(folder, "image", "label", **args)
    part = HuggingFace(str(folder / "saved"), "image", "label", **args)
    part.setup(clients=[1])
    first, second = (everything(data.train_loader(1, torch.Generator().manual_seed(2))) for data in (whole, part))
    assert torch.equal(first[0], second[0])
    assert part.record.sha256 == whole.record.sha256


# ---------------------------------------------------------------------- refusals

BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "data.name is empty; give a folder"),
    ({"name": "./missing"}, "'./missing' does not exist; name a folder"),
    ({"name": "a/b/c"}, "'a/b/c' does not exist; name a folder"),
    ({"name": __file__}, "is a file; name its folder"),
    ({"name": {"train": 3}}, "is a int; give a datasets.Dataset"),
    ({"name": {}}, "data.name has no split 'train'; it has none"),
    ({"config": "german"}, "data.config is 'german', and"),
    ({"split": "all"}, "has no split 'all'; it has train, test, val"),
    ({"test_split": "dev"}, "has no split 'dev'; it has train, test, val"),
    ({"inputs": "colour"}, "has no column 'colour'; it has "),
    ({"target": "colour"}, "has no column 'colour'; it has "),
    ({"client": "colour"}, "has no column 'colour'; it has "),
    ({"inputs": []}, "data.inputs is empty; name one column or more"),
    ({"target": []}, "data.target is empty; name one column or more"),
    ({"inputs": "kind"}, "data.inputs names 'kind', which is the target or the client; leave it out"),
    ({"inputs": ["age", "title"]}, "data.inputs names age (numbers), title (text); name one column, or several of"),
    ({"inputs": ["image", "age"]}, "data.inputs names image (images), age (numbers)"),
    ({"inputs": "wave"}, ", and row 0 has (3,); set data.length for lists of different lengths"),
    ({"inputs": "image", "length": 4}, "data.inputs are images; leave out data.length"),
    ({"inputs": "title", "mean": [0.5], "std": [0.5]}, "data.inputs are text; leave out data.mean and data.std"),
    ({"inputs": "age", "grayscale": True}, "data.inputs are numbers; leave out data.image_size, data.grayscale"),
    ({"inputs": "age", "image_size": 8}, "data.inputs are numbers; leave out data.image_size"),
    ({"inputs": "age", "vocab_size": 80}, "data.inputs are numbers; leave out data.tokenizer and data.vocab_size"),
    ({"inputs": "age", "tokenizer": "folder"}, "data.inputs are numbers; leave out data.tokenizer"),
    ({"inputs": "sound"}, "data.length is None; set it to the values of a signal"),
    ({"inputs": "image", "mean": [0.5, 0.5], "std": [1.0, 1.0]}, "data.mean has 2 values for 3; give one, or one each"),
    ({"inputs": "broken"}, " cannot be decoded; remove or replace it"),
    ({"inputs": "hole"}, "row 7: 'hole' is empty; correct or remove the row, or set data.impute to median, or to a "),
    ({"inputs": "nan"}, "holds NaN or infinity; correct or remove it, or set data.impute to median"),
    ({"inputs": "nan", "impute": "median"}, "nan has no number in the training rows, and data.impute is median"),
    ({"inputs": "title", "impute": "median"}, "data.inputs are text; leave out data.impute and data.levels"),
    ({"impute": {"count": 1.0}}, "data.impute names 'count', which is not in data.inputs, or in both; correct it"),
    ({"levels": {"age": ["1"]}, "impute": {"age": 1.0}}, "which is not in data.inputs, or in both; correct it"),
    (
        {"inputs": ["age", "title"], "levels": {"age": ["1"]}},
        "or give the levels of texts that are categories in data.",
    ),
    ({"target": "gap"}, "row 5: 'gap', which data.target names, is empty; correct or remove the row"),
    ({"target": "bare"}, "row 3: 'bare' is -1, which is not a class; choose a split with labels"),
    ({"target": "hole", "kind": "classes"}, "'hole' is float64, not a class; name another column"),
    (
        {"target": "title"},
        "'title' has 120 different values in 120 rows, too many for classes; set data.kind to numbers",
    ),
    ({"target": "title", "kind": "numbers"}, "'title' does not hold numbers"),
    ({"target": "nan"}, "targets: that of sample 0 is not finite"),
    ({"class_names": ["red"]}, "target 'green' is not a class of the training rows, which have red; correct it"),
    ({"target": "label", "class_names": ["a", "b", "c"]}, "data.class_names is ['a', 'b', 'c'], and 'label' has"),
    ({"kind": "numbers", "class_names": ["red"]}, "data.class_names are for classes, and the target is numbers"),
    ({"client": "hole"}, "row 7: 'hole', which data.client names, is empty"),
    ({"inputs": "count", "client": "age"}, "'age' is double; data.client must name texts or whole numbers"),
    ({"client": "gap"}, "row 5: 'gap', which data.client names, is empty"),
    ({"client": "writer", "least_samples": 121}, "data.least_samples is 121; it must be at most 120"),
    ({"client": "writer", "least_samples": 0}, "data.least_samples is 0; it must be at least 1"),
    ({"least_samples": 3}, "data.least_samples, data.clients and data.test_by are of data.client; name its column"),
    ({"client": "writer", "test_by": "rows"}, "data.test_by is 'rows'; it must be 'samples' or 'clients'"),
    ({"client": "writer", "test_by": "clients", "test_fraction": 0.01}, "data.test_fraction 0.01 of 7 clients is 0"),
    ({"client": "writer", "test_by": "clients", "test_split": "test"}, "data.test_split is 'test', and data.test_by"),
    ({"test_fraction": 1.0}, "data.test_fraction is 1.0; it must be above 0 and below 1"),
    ({"test_fraction": 0.001}, "leaves no test samples; raise data.test_fraction"),
    ({"client": "writer", "partition": Dirichlet(1.0)}, "which data.partition Dirichlet would ignore; set"),
    ({"vocab_size": 1}, "data.vocab_size is 1; it must be at least 2"),
]


def read_all(settings: dict[str, Any]) -> None:
    data = HuggingFace(**settings)
    data.setup()
    for loader in (
        data.test_loader(),
        *(data.train_loader(client, torch.Generator()) for client in range(data.num_clients)),
    ):
        for _ in loader:
            pass


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_with_the_setting_and_the_remedy(
    made: Any, settings: dict[str, Any], message: str
) -> None:
    folder, _, _ = made
    usual: dict[str, Any] = {"name": str(folder / "saved"), "inputs": "age", "target": "kind"}
    with pytest.raises(ConfigError, match=re.escape(message)) as told:
        read_all(usual | settings)
    assert "\n" not in str(told.value)


def test_damaged_files_and_rates_are_refused(made: Any, tmp_path: Path) -> None:
    _, _, whole = made
    small = whole.select_columns(["kind", "sound"]).select(range(20))
    other = small.cast_column("sound", datasets.Audio(sampling_rate=50))
    data = HuggingFace({"train": other}, "sound", "kind", length=10)
    data.setup()
    with pytest.raises(ConfigError, match="has 100 values a second, and the column 50; resample it"):
        list(data.test_loader())
    small.save_to_disk(str(tmp_path / "set"))
    (file,) = (tmp_path / "set").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        HuggingFace(str(tmp_path / "set"), "sound", "kind", length=10).setup()


def test_privacy_is_told_what_is_read_off_all_clients(made: Any) -> None:
    folder, _, _ = made
    name = str(folder / "saved")
    assert "data.class_names are read off" in str(HuggingFace(name, "age", "kind").pooled())
    assert "join clients by the sizes" in str(HuggingFace(name, "age", "label", client="writer", clients=3).pooled())
    assert HuggingFace(name, "age", "label", client="writer").pooled() is None
    assert HuggingFace(name, "age", "kind", class_names=["red", "green", "blue"]).pooled() is None
