"""A data set's own clients are never dropped without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_fed.command.cli import main
from lit_fed.data import (
    IID,
    ArrayFile,
    Arrays,
    ClientArrays,
    ClientFolders,
    Dirichlet,
    Grouped,
    Natural,
    Table,
    TensorDataModule,
    Wrapped,
)
from lit_fed.errors import ConfigError
from tests.command.support import error_of
from tests.data.formats.test_wrapped import Clinic
from tests.support import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
HOSPITALS = ("berlin", "hamburg", "ulm")


def table(folder: Path) -> str:
    lines = [f"{HOSPITALS[i % 3]},{i}.5,{-i}.5,{'xy'[i % 2]}" for i in range(60)]
    (folder / "visits.csv").write_text("\n".join(["hospital,a,b,kind", *lines]))
    return str(folder / "visits.csv")


def tables(folder: Path) -> str:
    (folder / "sites").mkdir()
    for name in HOSPITALS:
        lines = [f"{i}.5,{'xy'[i % 2]}" for i in range(20)]
        (folder / "sites" / f"{name}.csv").write_text("\n".join(["a,kind", *lines]))
    return str(folder / "sites")


def archive(folder: Path, clients: int = 3) -> str:
    x, y = np.arange(480, dtype=np.float32).reshape(60, 8) / 480, np.arange(60) % 2
    np.savez(
        folder / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, client_train=np.arange(60) % clients,
        client_test=np.arange(60) % clients,
    )  # fmt: skip
    return str(folder / "a.npz")


def folders(folder: Path, names: tuple[str, ...] = HOSPITALS) -> str:
    for client in names:
        for label in "xy":
            place = folder / "images" / client / label
            place.mkdir(parents=True)
            for n in range(5):
                Image.fromarray(np.full((4, 4), 10 * n, dtype=np.uint8)).save(place / f"{n}.png")
    return str(folder / "images")


class Owned(TensorDataModule):
    num_classes, input_shape = 2, (1,)

    def load_arrays(self) -> Arrays:
        x, y = np.zeros((6, 1), np.float32), np.arange(6) % 2
        return Arrays(x, y, x, y, np.arange(6) % 3, np.arange(6) % 3)


MADE: dict[str, tuple[Callable[..., Any], str]] = {
    "a column": (lambda at, **more: Table(table(at), "kind", ["a", "b"], "hospital", **more), "data.client 'hospital'"),
    "files": (lambda at, **more: Table(tables(at), "kind", ["a"], **more), "sites, with a file per client,"),
    "an archive": (lambda at, **more: ArrayFile(archive(at), **more), "a.npz"),
    "folders": (lambda at, **more: ClientFolders(folders(at), **more), "images, with a folder per client,"),
    "a field": (
        lambda at, **more: Wrapped(Clinic(), client="site", **more), "data.client 'site'"
    ),
    "arrays": (lambda at, **more: Owned(**more), "client_train of the data"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_another_partition_is_refused_by_both_keys(kind: str, tmp_path: Path) -> None:
    make, what = MADE[kind]
    data = make(tmp_path, partition=Dirichlet(0.3), num_clients=2)
    with pytest.raises(ConfigError) as told:
        data.setup()
    assert f"{what} names 3 clients, which data.partition Dirichlet would ignore" in str(told.value)
    assert "set data.partition to Natural and data.num_clients to None, or " in str(told.value)


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "arrays"])
def test_own_clients_are_the_clients_where_nothing_else_is_asked_for(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = MADE[kind][0](tmp_path)
    data.setup()
    assert isinstance(data.partition, Natural)
    assert data.num_clients == 3
    assert capsys.readouterr().out == ""


def test_clients_who_take_no_part_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ArrayFile(archive(tmp_path), num_clients=2).setup()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        f"data.num_clients is 2, and client_train of {tmp_path / 'a.npz'} names 3 clients; the others take no part "
        "(null takes all of them)"
    )


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "arrays"])
def test_own_clients_may_be_grouped(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = MADE[kind][0](tmp_path, partition=Grouped(2))
    data.setup()
    assert (data.num_clients, data.client_names) == (2, None)
    sizes = [len(data._ready.train[client_id]) for client_id in range(2)]
    assert sizes[0] == 2 * sizes[1]  # three clients of equal size
    assert capsys.readouterr().out == ""


def test_groups_that_take_no_part_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ArrayFile(archive(tmp_path), num_clients=1, partition=Grouped(2)).setup()
    (line,) = capsys.readouterr().out.splitlines()
    assert "names 3 clients, which make 2 clients; the others take no part (null takes all of them)" in line


def test_one_client_alone_may_be_cut(tmp_path: Path) -> None:
    for data in (
        ArrayFile(archive(tmp_path, clients=1), partition=IID(), num_clients=4),
        ClientFolders(folders(tmp_path, ("all",)), partition=IID(), num_clients=4),
    ):
        data.setup()
        assert len(data.census.class_histogram()) == 4


def test_a_partition_that_an_earlier_file_left_does_not_replace_the_hospitals(tmp_path: Path, capsys: Any) -> None:
    words = ["fit", "-c", QUICKSTART, "--data", "Table", "--data.path", table(tmp_path), "--data.target", "kind"]
    words += ["--data.client", "hospital", "--model.network", "mlp", "--trainer.max_rounds", "1"]
    words += ["--trainer.default_root_dir", str(tmp_path), "--trainer.enable_progress_bar", "false"]
    told = error_of(words, capsys)
    assert told.startswith("data.client 'hospital' names 3 clients, which data.partition Dirichlet would ignore")
    assert told.endswith("or leave data.client out and name data.features")
    assert not (tmp_path / "lightning_logs").exists()
    remedy = ["--data.partition", "Natural", "--data.num_clients", "null", "--trainer.participation.count", "3"]
    main([*words, *remedy])
    assert (tmp_path / "lightning_logs" / "version_0" / "partition.json").read_text().count('"name"') == 3


def test_folders_beyond_the_number_of_clients_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros((4, 3), np.float32), np.arange(4) % 2
    for one in range(4):
        (tmp_path / f"client_{one}").mkdir()
        np.savez(tmp_path / f"client_{one}" / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    for clients in ([0], None):  # an end has its own clients' folders, and none that it leaves out
        data = ClientArrays(num_clients=2, stored_shape=[3], num_classes=2, root=str(tmp_path))
        data.setup("fit", clients)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"data.num_clients is 2; client_2 and 1 other folders in {tmp_path} take no part"


def test_clients_who_are_only_tested_on_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new.csv").write_text("hospital,a,b,kind\nulm,1,2,x\nUlm,1,2,y\n")
    data = Table(table(tmp_path), "kind", ["a", "b"], "hospital", test_path=str(tmp_path / "new.csv"))
    data.setup()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"{tmp_path / 'new.csv'} has rows of client Ulm without training rows; they are in the shared"
    )
    assert [data.test_loader(one).num_samples for one in (0, 1, 2, None)] == [0, 0, 1, 2]
