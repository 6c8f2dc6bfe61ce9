"""The workflows of .github call what a contributor calls, on the Pythons that pyproject.toml declares."""

import re
import tomllib

import yaml

from tests.support import ROOT

WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_every_declared_python_is_checked_by_ci_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [found[1] for one in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]
    job = yaml.safe_load(WORKFLOWS["check"])["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == declared == ["3.11", "3.12", "3.13"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_wheel_and_site_are_built() -> None:
    steps = yaml.safe_load(WORKFLOWS["release"])["jobs"]["build"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [
        "python -m pip wheel --no-deps --wheel-dir dist .",
        "make docs",
    ]
