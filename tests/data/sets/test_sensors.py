"""UCI-HAR and PAMAP2, read from small files written here in their published formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.data import PAMAP2, UCIHAR, Natural
from lit_fed.errors import ConfigError
from tests.data.test_across_datasets import everything, ready

# ---------------------------------------------------------------------- UCI-HAR


def write_uci_har(root: Path, people: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Nine files of signals a split, 128 numbers a line as published, labels from 1; returns the windows by split."""
    windows = {}
    for number, (split, subjects) in enumerate(people.items()):
        folder = root / "UCI HAR Dataset" / split
        (folder / "Inertial Signals").mkdir(parents=True)
        # window i, signal s, step t holds i + s/10 + t/1000, and 100 more in the second split
        i, s, t = np.ogrid[: len(subjects), :9, :128]
        windows[split] = (100 * number + i + s / 10 + t / 1000).astype(np.float32)
        kinds = ("body_acc", "body_gyro", "total_acc")
        for signal, name in enumerate(f"{kind}_{axis}" for kind in kinds for axis in "xyz"):
            lines = ["  ".join(f"{value:.7e}" for value in row) for row in windows[split][:, signal]]
            (folder / "Inertial Signals" / f"{name}_{split}.txt").write_text("\n ".join(lines) + "\n")
        labels = "".join(f"{1 + at % 6}\n" for at in range(len(subjects)))
        (folder / f"y_{split}.txt").write_text(labels)
        (folder / f"subject_{split}.txt").write_text("".join(f"{subject}\n" for subject in subjects))
    return windows


PEOPLE = {"train": [7] * 6 + [3] * 6, "test": [2] * 6}


def test_uci_har_reads_the_published_files(tmp_path: Path) -> None:
    windows = write_uci_har(tmp_path, PEOPLE)
    data = ready(UCIHAR(root=str(tmp_path), partition=Natural()))
    assert (data.num_classes, data.input_shape, data.in_channels, data.num_clients) == (6, (9, 128), 9, 2)
    x, y = everything(data.test_loader())
    np.testing.assert_allclose(x, windows["test"], rtol=1e-6)
    assert y.tolist() == [0, 1, 2, 3, 4, 5]
    first, _ = everything(data.train_loader(0, torch.Generator()))  # person 3, whose windows come second
    np.testing.assert_allclose(np.sort(first[:, 0, 0]), windows["train"][6:, 0, 0], rtol=1e-6)
    assert data.class_names[3] == "sitting"


def test_uci_har_joined_gives_each_person_windows_of_both_kinds(tmp_path: Path) -> None:
    windows = write_uci_har(tmp_path, PEOPLE)
    data = ready(UCIHAR(root=str(tmp_path), partition=Natural(), test_fraction=0.34))
    assert data.num_clients == 3
    for client, own in enumerate((windows["test"], windows["train"][6:], windows["train"][:6])):  # 2, 3 and 7
        train, test = (
            everything(loader)[0][:, 0, 0].tolist()
            for loader in (data.train_loader(client, torch.Generator()), data.test_loader(client))
        )
        assert (len(train), len(test)) == (4, 2)  # ⌊0.34·6⌋ = 2
        np.testing.assert_allclose(sorted(train + test), own[:, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("Inertial Signals/body_gyro_y_train.txt", None, "body_gyro_y_train.txt is missing or damaged"),
        ("Inertial Signals/body_gyro_y_train.txt", "1 2\n", "holds 1 rows of 2 numbers, and y_train.txt 12 labels"),
        ("y_train.txt", "1\nx\n", "y_train.txt is missing or damaged"),
        ("y_train.txt", "7\n" * 12, "label 6 of sample 0 is not in 0 … 5"),
        ("subject_train.txt", "3\n", "12 labels but 1 subjects"),
    ],
)
def test_uci_har_files_that_cannot_be(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    write_uci_har(tmp_path, PEOPLE)
    path = tmp_path / "UCI HAR Dataset" / "train" / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError) as error:
        ready(UCIHAR(root=str(tmp_path), partition=Natural()))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- PAMAP2


def write_pamap2(root: Path, activities: dict[int, list[int]]) -> dict[int, np.ndarray]:
    """54 columns a line: time, activity, heart rate, three units of 17; returns the rows by person."""
    folder = root / "PAMAP2_Dataset" / "Protocol"
    folder.mkdir(parents=True)
    written = {}
    for person, labels in activities.items():
        rows = np.arange(54) + np.arange(len(labels))[:, None] / 100  # column c, line t: c + t/100
        rows[:, 0], rows[:, 1] = 8.38 + np.arange(len(labels)) / 100, labels
        rows[np.arange(len(labels)) % 9 != 0, 2] = np.nan  # the heart rate, at 9 Hz
        lines = [" ".join("NaN" if np.isnan(value) else f"{value:.4f}" for value in row) for row in rows]
        (folder / f"subject{person}.dat").write_text("\n".join(lines) + "\n")
        written[person] = rows
    return written


# columns 5–7 and 11–16 counted from 1, of the hand's unit, then 17 and 34 columns on
COLUMNS = [c - 1 + unit for unit in (0, 17, 34) for c in (5, 6, 7, 11, 12, 13, 14, 15, 16)]
UNITS = np.array(([9.81] * 3 + [1.0] * 3 + [50.0] * 3) * 3)[:, None]


def test_pamap2_reads_the_published_files(tmp_path: Path) -> None:
    # Person 101: transient, 10 lines of lying (1), transient, 11 of rope jumping (24), an optional activity (9).
    # A fifth of each stretch is tested on: lines 2–9 train and 10–11 test, 14–22 train (9) and 23–24 test.
    # Windows of 2: four and one, four (line 22 is left over) and one.
    labels = [0, 0, *[1] * 10, 0, 0, *[24] * 11, *[9] * 5]
    written = write_pamap2(tmp_path, {101: labels, 105: [4] * 10})
    data = PAMAP2(root=str(tmp_path), partition=Natural(), window=2)
    assert (data.num_classes, data.input_shape) == (12, (27, 2))
    assert ready(data).num_clients == 2
    assert [data.census.num_samples(client) for client in range(2)] == [8, 4]
    x, y = everything(data.test_loader())
    assert y.tolist() == [0, 11, 3]
    for window, at in zip(x[:2], (10, 23), strict=True):
        np.testing.assert_allclose(window, written[101][at : at + 2, COLUMNS].T / UNITS, rtol=1e-4)
    assert [data.class_names[label] for label in (0, 11, 3)] == ["lying", "rope jumping", "walking"]


def test_pamap2s_windows_overlap_as_they_are_told_to_but_never_those_of_training_and_test(tmp_path: Path) -> None:
    # 20 lines: 16 to train on and 4 to test on; windows of 4 every 2 lines: (16 − 4)/2 + 1 = 7, and 1.
    write_pamap2(tmp_path, {101: [5] * 20})
    data = ready(PAMAP2(root=str(tmp_path), partition=Natural(), window=4, stride=2))
    assert (data.census.num_samples(0), data.test_loader().num_samples) == (7, 1)
    # the first of the 27 columns is column 4 from 0: 4 + t/100, divided by 9.81
    times = {
        part: {round((value * 9.81 - 4) * 100) for value in everything(loader)[0][:, 0].flatten().tolist()}
        for part, loader in (("train", data.train_loader(0, torch.Generator())), ("test", data.test_loader()))
    }
    assert times == {"train": set(range(16)), "test": {16, 17, 18, 19}}


def test_pamap2s_lost_values_are_interpolated(tmp_path: Path) -> None:
    # The first column is lost in lines 0 and 2: the nearest, and half between its neighbours.
    write_pamap2(tmp_path, {101: [5] * 20})
    path = tmp_path / "PAMAP2_Dataset" / "Protocol" / "subject101.dat"
    rows = [line.split() for line in path.read_text().splitlines()]
    rows[0][4] = rows[2][4] = "NaN"
    rows[1][4], rows[3][4] = "9.81", "19.62"
    path.write_text("\n".join(" ".join(row) for row in rows))
    data = ready(PAMAP2(root=str(tmp_path), partition=Natural(), window=4))
    first = everything(data.train_loader(0, torch.Generator()))[0][:, 0]
    (window,) = [one for one in first.tolist() if one[1] == pytest.approx(1.0)]
    assert window == pytest.approx([1.0, 1.0, 1.5, 2.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "data.window is 0"),
        ({"stride": 0}, "data.stride is 0"),
        ({"test_fraction": 1.0}, "data.test_fraction is 1.0"),
        ({"window": 9}, "subject101.dat holds no window of 9 samples of one activity to train on"),
        ({"window": 3}, "holds no window to test on"),
        ({"root": "absent"}, "absent/PAMAP2_Dataset/Protocol holds no subject101.dat"),
    ],
)
def test_pamap2_that_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_pamap2(tmp_path, {101: [1] * 10})
    with pytest.raises(ConfigError) as error:
        ready(PAMAP2(**{"root": str(tmp_path), "partition": Natural(), "window": 2, **settings}))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_pamap2_files_that_are_damaged(tmp_path: Path) -> None:
    write_pamap2(tmp_path, {101: [1] * 10})
    path = tmp_path / "PAMAP2_Dataset" / "Protocol" / "subject101.dat"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], lines[5][:40]]))  # cut off
    with pytest.raises(ConfigError, match=r"subject101\.dat is missing or damaged"):
        ready(PAMAP2(root=str(tmp_path), partition=Natural(), window=2))
    path.write_text("\n".join(" ".join(["NaN" if at == 4 else "1" for at in range(54)]) for _ in range(10)))
    with pytest.raises(ConfigError, match=r"subject101\.dat lacks all values of a sensor"):
        ready(PAMAP2(root=str(tmp_path), partition=Natural(), window=2))
