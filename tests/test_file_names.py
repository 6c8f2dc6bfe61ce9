"""What may become part of a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.engine.storage.packs import VersionedFiles
from lit_fed.errors import CheckpointError
from lit_fed.file_names import is_file_name, shown


@pytest.mark.parametrize("name", ["0", "late-3", "fedavg", "größe_2", "a b", "v1.2", "x" * 100, "日本"])
def test_names(name: str) -> None:
    assert is_file_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/a",
        "a\\b",
        "~root",
        "-rf",
        ".x",
        " x",
        "x ",
        "x.",
        "a\0",
        "a\n",
        "\x1b[2J",
        "C:a",
        "a*",
        "x" * 101,
        None,
        3,
        b"a",
    ],
)
def test_what_is_no_name(name: object) -> None:
    assert not is_file_name(name)


@given(st.text(max_size=20))
def test_a_name_stays_in_its_folder(name: str) -> None:
    if is_file_name(name):
        assert (Path("/a/b") / name).parent == Path("/a/b")
        assert Path(name).name == name


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", ""])
def test_a_client_with_such_a_name_is_refused_where_its_path_is_made(tmp_path: Path, name: str) -> None:
    files = VersionedFiles(tmp_path)
    for use in (
        lambda: files.read(name, (0, 0)),
        lambda: files.write(name, 0, {}),
        lambda: files.forget([(name, 0)], delete=True),
    ):
        with pytest.raises(CheckpointError, match=r"client name '.*' would place its state outside of the run"):
            use()


def test_a_path_is_shown_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(Path.cwd() / "lightning_logs" / "version_0") == str(Path("lightning_logs", "version_0"))
    assert shown("a/b") == str(Path("a/b"))
    assert shown(Path.cwd().parent / "other") == str(Path.cwd().parent / "other")
