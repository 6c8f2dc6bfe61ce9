"""The package as others install it: what is in its wheel, and a first run in an empty folder with nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT, rows

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as pip builds it."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_configurations_the_pages_and_the_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    own |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.*") if path.suffix != ".pyc"}
    assert {f"lit_fed/{name}" for name in own} <= names
    assert {"lit_fed/generated/lit_fed.schema.json", "lit_fed/generated/completion.bash"} <= names
    assert not [name for name in names if name.endswith(".pyc")]
    assert "lit_fed/py.typed" in names
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lit_fed").rglob("*.py")}
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lit_fed").rglob("*.html")}
    assert code | templates <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lit_fed"}, "more than the package"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """Of the wheel; its payload is the long description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
        return Parser().parsestr(archive.read(name).decode())


def test_the_metadata_are_complete(metadata: Message) -> None:
    for key in ("Summary", "Author", "Keywords", "Requires-Python", "License-Expression", "Description-Content-Type"):
        assert metadata[key], key
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert {*PROJECT["optional-dependencies"]} == {*metadata.get_all("Provides-Extra", [])}
    assert metadata.get_all("Project-URL") == [f"{name}, {url}" for name, url in PROJECT["urls"].items()]


def test_no_link_and_no_picture_of_the_long_description_is_relative(metadata: Message) -> None:
    """An index shows the README without the repository beside it: each target is a file of this version."""
    shown, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text(encoding="utf-8")
    source, version = PROJECT["urls"]["Source"], PROJECT["version"]
    raw = source.replace("//github.com/", "//raw.githubusercontent.com/") + f"/v{version}/"
    link = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
    before, after = link.findall(readme), link.findall(shown)
    assert len(before) == len(after) > 20
    for (_, own), (is_picture, target) in zip(before, after, strict=True):
        if own.startswith(("https:", "#")):
            assert target == own
        elif is_picture:
            assert target == f"{raw}{own}?sanitize=true"
        else:
            assert target == f"{source}/blob/v{version}/{own}"
        if not own.startswith(("https:", "#")):
            assert (ROOT / own.partition("#")[0]).exists(), own
    assert link.sub("", shown) == link.sub("", readme), "more than the targets differs"


def test_the_addresses_of_the_project_are_in_one_place() -> None:
    """`[project.urls]`; what cannot read it repeats it."""
    urls = PROJECT["urls"]
    assert {"Home", "Documentation", "Source", "Issues", "Changelog"} == urls.keys()
    assert all(url.startswith(urls["Source"]) for name, url in urls.items() if name != "Documentation")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["repository-code"], citation["url"]) == (urls["Source"], urls["Documentation"])
    site = dict(re.findall(r"^(site_url|repo_url): (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert site == {"site_url": urls["Documentation"], "repo_url": urls["Source"]}


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f"\n## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_first_run_in_an_empty_folder_with_nothing_but_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Everything else comes from the packages of this environment, which is not installed anew."""
    home, here = tmp_path / "home", tmp_path / "here"
    venv.create(home, with_pip=False)
    bins = home / "bin"
    packages = next(home.glob("lib/python*/site-packages"))
    there = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "this_environment.pth").write_text("\n".join(there))
    install = [sys.executable, "-m", "pip", "--python", str(bins / "python"), "install", "--no-deps", "--no-index"]
    # pip takes the installed lit_fed of this environment for the one that it is to install
    done = subprocess.run([*install, "--force-reinstall", "--target", str(packages), str(wheel)], capture_output=True)
    assert done.returncode == 0, done.stderr
    here.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def python(*words: str) -> str:
        ran = subprocess.run(
            [str(bins / "python"), *words], cwd=here, env=env, capture_output=True, text=True, timeout=240
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert str(packages) in python("-c", "import lit_fed; print(lit_fed.__file__)")
    listed = python("-m", "lit_fed", "configs", "method")
    assert "method/fedprox.yaml" in listed
    short = ["--trainer.max_rounds", "2", "--trainer.local_epochs", "1", "--trainer.logger", "false"]
    python("-m", "lit_fed", "fit", "-c", "quickstart.yaml", "-c", "configs/method/fedprox.yaml", *short)
    assert len(rows(here / "lightning_logs/version_0/metrics.csv")) == 2
    listed = python("-m", "lit_fed", "study", "-c", "papers/fedprox/studies/fedprox_heterogeneity.yaml", "--dry_run")
    assert "prox=0.1/shards=2/2" in listed
