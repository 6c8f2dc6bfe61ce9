"""Client folders: what is left out is said, and no client or class is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_fed.data import ClassFolders, ClientFolders, Table
from lit_fed.data.population.files import image_files
from lit_fed.errors import ConfigError


def images(root: Path, *places: str, count: int = 3, ending: str = ".png") -> None:
    for place in places:
        (root / place).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            Image.fromarray(np.full((4, 4), n, dtype=np.uint8)).save(root / place / f"{n}{ending}")


def others(root: Path, *places: str) -> None:
    for place in places:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text("no image")


def test_what_is_left_out_is_counted_by_ending_and_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path, "a/x", "a/y", "b/x", "b/y")
    images(tmp_path, "a/x/deeper", "b", count=1)  # where none are looked for
    others(tmp_path, "notes.txt", "a/x/1.heic", "b/x/2.HEIC", "b/.DS_Store", "b/y/._0.png")
    data = ClientFolders(root=str(tmp_path))
    assert (data.num_classes, data.class_names) == (2, ["x", "y"])
    # Read: 2 clients · 2 classes · 3. Left out: 2 .heic, 2 .png that lie elsewhere, 1 .txt.
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"left out 5 of 17 files in {tmp_path}: ")
    assert "2 .png" in line
    assert "2 .heic" in line
    assert "1 .txt, such as notes.txt; .png, " in line
    data.setup()
    assert capsys.readouterr().out == ""


def test_nothing_is_said_where_all_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images(tmp_path, "a/x", "b/y")
    images(tmp_path, "a/x", "b/y", ending=".tiff")
    images(tmp_path, "a/y", ending=".bmp")
    (tmp_path / "b" / "x").mkdir()  # a client may have none of a class
    data = ClientFolders(root=str(tmp_path))
    assert data.columns.test is not None
    assert len(data.columns) + len(data.columns.test) == 15
    assert capsys.readouterr().out == ""


def _unread_class(root: Path) -> None:
    images(root, "a/x", "b/x", "b/y")
    others(root, "a/y/0.heic", "a/y/1.heic")


def _only_deeper(root: Path) -> None:
    images(root, "a/x", "b/x", "b/y/2024")


def _empty_class(root: Path) -> None:
    images(root, "a/x", "b/x")
    (root / "a" / "z").mkdir()


def _empty_client(root: Path) -> None:
    images(root, "a/x", "b/x")
    others(root, "c/x.heic")


def _third_part(root: Path) -> None:
    images(root, "a/train/x", "a/test/x", "a/val/x")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_unread_class, "a/y holds 2 files, such as 0.heic, and no images; put .png"),
        (_only_deeper, "b/y holds 3 files, such as 2024/0.png, and no images"),
        (_empty_class, "every folder of class z is empty; add images, or remove the folders"),
        (_empty_client, "c holds no images in class folders; add .png"),
        (_third_part, "a has a folder val beside train and test; move its images there, or remove it"),
    ],
)
def test_no_client_and_no_class_is_lost(prepare: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    with pytest.raises(ConfigError) as told:
        _ = ClientFolders(root=str(tmp_path)).num_classes
    assert message in str(told.value)


def test_inputs_to_predict_on_that_are_left_out_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images(tmp_path, "new", "new/deeper", count=5)
    others(tmp_path, *(f"new/{n}.heic" for n in range(10)))
    assert len(image_files(tmp_path / "new")) == 10
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"left out 10 of 20 files in {tmp_path / 'new'}: 10 .heic, such as 0.heic; ")


def test_a_folder_of_tables_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.csv", "B.CSV", "c.tsv"):
        (tmp_path / name).write_text("value,label\n" + "\n".join(f"{i},{'xy'[i % 2]}" for i in range(10)))
    assert Table(str(tmp_path), "label", ["value"]).own_client_names() == ["B", "a"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"left out 1 of 3 files in {tmp_path}: 1 .tsv, such as c.tsv;")


def test_folders_of_classes_hold_the_images_that_a_single_clients_folder_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path, "all/x", "all/y", count=10)
    others(tmp_path, "all/notes.txt", "all/x/1.heic")
    by_class = ClassFolders(root=str(tmp_path / "all"), num_clients=2, batch_size=20)
    (line,) = capsys.readouterr().out.splitlines() if by_class.class_names else []
    assert line.startswith(f"left out 2 of 22 files in {tmp_path}")
    by_client = ClientFolders(root=str(tmp_path), batch_size=20)
    for data in (by_class, by_client):
        data.setup()
    assert (by_class.class_names, by_class.client_names, by_class.num_clients) == (["x", "y"], None, 2)
    assert by_client.client_names == ["all"]
    # A fifth of 20 is tested on; a partition cuts the rest.
    assert [by_class.census.num_samples(client) for client in (0, 1)] == [8, 8]
    assert by_class.test_loader().num_samples == by_client.test_loader().num_samples == 4
    assert by_class.columns.clients is None
    assert sorted([*by_class.columns.x, *by_class.columns.test.x]) == sorted(
        [*by_client.columns.x, *by_client.columns.test.x]
    )


def test_folders_of_classes_may_be_split(tmp_path: Path) -> None:
    images(tmp_path, "train/x", "train/y", count=6)
    images(tmp_path, "test/x", "test/y", count=2)
    data = ClassFolders(root=str(tmp_path), num_clients=3)
    data.setup()
    assert data.test_loader().num_samples == 4
    assert data.census.class_histogram().sum(axis=0).tolist() == [6, 6]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has a folder empty beside train and test"):
        ClassFolders(root=str(tmp_path)).setup()
