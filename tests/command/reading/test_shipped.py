"""Configuration files of the package: found where there is no such file, listed, copied out, completed by a shell."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from lit_fed.command.reading.shipped import first_line, located, shipped
from lit_fed.errors import ConfigError
from lit_fed.studies.file.study import read_study
from lit_fed.studies.running.cells import lay_out
from tests.command.support import error_of, settings_of
from tests.support import ROOT, small_disk

MINE = "algorithm:\n  class_path: FedProx\n  init_args: {mu: 7.0}\n"


@pytest.mark.parametrize(
    "name", ["method/fedprox.yaml", "configs/method/fedprox.yaml", "./configs/method/fedprox.yaml"]
)
def test_a_file_that_is_not_here_is_the_packages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(["fit", "-c", "quickstart.yaml", f"--config={name}"], capsys)
    assert settings["algorithm"]["class_path"] == "lit_fed.methods.FedProx"
    assert settings["algorithm"]["init_args"]["mu"] == 0.01
    assert located(name) == str(ROOT / "configs/method/fedprox.yaml")


def test_a_file_that_is_here_wins(capsys: pytest.CaptureFixture[str]) -> None:
    Path("method").mkdir()
    Path("method/fedprox.yaml").write_text(MINE)
    settings = settings_of(["fit", "-c", "quickstart.yaml", "-c", "method/fedprox.yaml"], capsys)
    assert settings["algorithm"]["init_args"]["mu"] == 7.0


@pytest.mark.parametrize("name", ["/method/fedprox.yaml", "../configs/method/fedprox.yaml", "method", "", "a" * 5000])
def test_nothing_else_is_taken_for_one_of_them(name: str) -> None:
    assert located(name) == name


def test_a_study_finds_its_files_in_the_package_and_its_cells_are_the_same(tmp_path: Path) -> None:
    """Where a file was found is no part of what a cell is, so finished cells stay finished."""
    content = "configs: [{0}quickstart.yaml]\nmetric: global/acc\nrows: {{a: {{configs: [{0}method/fedprox.yaml]}}}}\n"
    content += "profiles: {{pocket: {{}}}}\n"
    found = []
    for number, prefix in enumerate(("", "configs/", f"{ROOT}/configs/")):
        path = tmp_path / f"study_{number}.yaml"
        path.write_text(content.format(prefix))
        (cell,) = lay_out(read_study(path, "pocket"), tmp_path).cells
        found.append((cell.fingerprint, cell.args[1].endswith(f"{prefix}quickstart.yaml")))
    assert found == [(found[0][0], True)] * 3
    assert read_study("papers/fedprox/studies/fedprox_heterogeneity.yaml", "pocket").name == "fedprox_heterogeneity"


def test_all_of_them_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list((ROOT / "configs").rglob("*.yaml")))
    assert lines[0].split()[:2] == ["quickstart.yaml", "Quickstart:"]
    for every in ("configs", "."):
        main(["configs", every])
        assert capsys.readouterr().out.splitlines() == lines
    main(["configs", "configs/method/"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(name for name in shipped() if name.startswith("method/"))
    assert all(first_line(path) for path in shipped().values()), "a file does not say what it is"


def test_one_is_copied_out_and_never_over_a_file_of_yours(capsys: pytest.CaptureFixture[str]) -> None:
    main(["copy", "method/fedprox.yaml"])
    assert capsys.readouterr().out == "written     fedprox.yaml; use it with -c fedprox.yaml\n"
    assert Path("fedprox.yaml").read_bytes() == (ROOT / "configs/method/fedprox.yaml").read_bytes()
    Path("fedprox.yaml").write_text("mine")
    told = error_of(["copy", "configs/method/fedprox.yaml"], capsys)
    assert told == "fedprox.yaml exists already; name another file with --output"
    assert Path("fedprox.yaml").read_text() == "mine"
    main(["copy", "method/fedprox.yaml", "--output", "mine.yaml"])
    assert Path("mine.yaml").is_file()


def test_examples_are_copied_with_the_module_that_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["copy", "examples/my_module.yaml"])
    copied = ["examples/my_module.py", "examples/my_module.yaml"]
    assert capsys.readouterr().out.splitlines() == [f"written     {name}" for name in copied]
    for name in copied:
        assert Path(name).read_bytes() == (ROOT / name).read_bytes()
    told = error_of(["copy", "examples"], capsys)
    assert told == "examples/my_module.py exists already; name another folder with --output"
    main(["copy", "examples", "-o", "there"])
    listed = subprocess.run(
        ["git", "ls-files", "examples"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    wanted = {Path(name) for name in listed.split()}
    assert {Path("examples/flower_app/pyproject.toml"), Path("examples/notebooks/first_federation.ipynb")} <= wanted
    assert {path.relative_to("there") for path in Path("there").rglob("*.*")} == wanted
    assert error_of(["copy", "examples/mine.yaml"], capsys).startswith("there is no configuration file named")


def test_the_skill_is_copied_into_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["copy", "skill"])
    text = Path("lit-fed/SKILL.md").read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---")[1])
    assert front.keys() == {"name", "description"}
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        assert {"trainer", "data", "model", "algorithm"} >= yaml.safe_load(block).keys()


def test_a_full_disk_leaves_no_half_of_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(100):
        told = error_of(["copy", "method/fedprox.yaml"], capsys)
    assert told.startswith("cannot write fedprox.yaml: [Errno 27] File too large")
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["copy", "method/fedprx.yaml"],
            "there is no configuration file named 'method/fedprx.yaml'; did you mean method/fedp",
        ),
        (["copy", "nothing"], "there is no configuration file named 'nothing'; `lit-fed configs` lists them"),
        (
            ["copy", "method/fedprox.yaml", "-o", "no/where.yaml"],
            "there is no folder no; name another file",
        ),
        (["configs", "metod"], "there is no folder of configurations named 'metod'; choose method"),
        (
            ["configs", "zzz"],
            "there is no folder of configurations named 'zzz'; choose aggregation, attack, data, evaluation, method",
        ),
        (["completion", "fish"], "shell: expected 'bash', 'zsh' or 'tcsh', not fish"),
    ],
)
def test_what_is_not_there_is_said(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(args, capsys).startswith(told)


# ---------------------------------------------------------------------- completion

COMPLETE = """
source ./completion.sh
complete_it() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9; COMPREPLY=()
  _shtab_lit_fed
  echo "${COMPREPLY[@]}"
}
complete_it lit-fed sim
complete_it lit-fed fit --trainer.max_r
complete_it lit-fed fit -c method/fedprox
complete_it lit-fed fit --algorithm FedProx
complete_it lit-fed fit --algorithm.weighti
complete_it lit-fed fit --trainer.enable_progress_bar t
complete_it lit-fed study --dry
"""


def test_a_shell_completes_commands_options_classes_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    Path("completion.sh").write_text(capsys.readouterr().out)
    done = subprocess.run(["bash", "-c", COMPLETE], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "simulate",
        "--trainer.max_rounds",
        "method/fedprox.yaml",
        "FedProx",
        "--algorithm.weighting",
        "true",
        "--dry_run",
    ]


def test_an_extra_is_named_where_a_network_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from lit_fed.networks.text import _build_bert

    absent: Any = None
    monkeypatch.setitem(sys.modules, "transformers", absent)
    with pytest.raises(
        ConfigError, match=r"bert_tiny needs transformers; install it with pip install 'lit-fed\[text\]'"
    ):
        _build_bert(100, None)
