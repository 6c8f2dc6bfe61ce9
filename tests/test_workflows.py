"""The workflows of .github call what a contributor calls, on the Pythons that pyproject.toml declares."""

import re
import shlex
import tomllib
from datetime import date, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from tests.conftest import DAILY, long_files, pytest_collection_modifyitems, third
from tests.support import ROOT

WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")}
RELEASE = yaml.safe_load(WORKFLOWS["release"])


def commands(steps: list[dict[str, Any]]) -> list[str]:
    """The commands of a job's steps."""
    return [step["run"] for step in steps if "run" in step]


def test_every_declared_python_is_checked_by_ci_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [found[1] for one in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]
    job = yaml.safe_load(WORKFLOWS["check"])["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == declared == ["3.11", "3.12", "3.13"]
    assert commands(job["steps"]) == [".ci/run"]


def test_wheel_and_site_are_built() -> None:
    steps = RELEASE["jobs"]["build"]["steps"]
    assert commands(steps) == ["python -m pip wheel --no-deps --wheel-dir dist .", "make docs"]


def test_the_wheel_runs_on_every_declared_python_without_the_repository() -> None:
    job = RELEASE["jobs"]["clean"]
    assert job["needs"] == "build"
    assert job["strategy"]["matrix"] == yaml.safe_load(WORKFLOWS["check"])["jobs"]["check"]["strategy"]["matrix"]
    assert not [step for step in job["steps"] if "checkout" in step.get("uses", "")]
    runs = [words for text in commands(job["steps"]) if (words := shlex.split(text))[0] == "clean/bin/lit-fed"]
    assert [words[1] for words in runs] == ["fit", "study"]
    files = [word for words in runs for word in words if word.endswith(".yaml")]
    assert not [name for name in files if not (ROOT / "configs" / name).is_file()]


def test_an_inventory_and_the_licences_of_what_was_installed_are_kept() -> None:
    steps = RELEASE["jobs"]["clean"]["steps"]
    kept = steps[-1]["with"]["path"].split()
    assert kept == ["lit_fed.cdx.json", "licences.md"]
    for program, file in zip(("cyclonedx-py environment", "pip-licenses --python clean/"), kept, strict=True):
        assert [text for text in commands(steps) if text.startswith(program) and f"--output-file {file}" in text]


def test_only_a_tag_of_the_version_publishes_and_only_what_ran() -> None:
    job = RELEASE["jobs"]["publish"]
    assert (job["if"], job["needs"]) == ("github.ref_type == 'tag'", "clean")
    (checked,) = commands(job["steps"])
    assert checked == 'ls "dist/lit_fed-${GITHUB_REF_NAME#v}-py3-none-any.whl"'
    *_, last = job["steps"]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert last["with"] == {"attestations": True}  # and no password: the index trusts the workflow's token


def test_only_publishing_may_do_more_than_read() -> None:
    for text in WORKFLOWS.values():
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        assert {name for name, job in workflow["jobs"].items() if "permissions" in job} <= {"publish"}
    assert RELEASE["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert not any("secrets." in text for text in WORKFLOWS.values())


@pytest.mark.parametrize("first", [date(2026, 11, 27), date(2027, 12, 31)])
def test_three_days_in_a_row_run_every_long_test(first: date) -> None:
    days = [third(first + timedelta(days=later)) for later in range(3)]
    assert set().union(*days) == set(long_files())
    assert days[0] & days[1] == days[1] & days[2] == days[0] & days[2] == set(DAILY)
    assert max(map(len, days)) - min(map(len, days)) <= 1
    assert third(first + timedelta(days=3)) == days[0]


def test_ci_runs_the_third_of_today() -> None:
    assert '-m long --third "$(date +%F)"\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_a_third_leaves_out_long_tests_of_other_days_and_no_quick_ones() -> None:
    """A file of another day has long and quick tests, a file of the day a long one."""
    day = date(2026, 11, 27)
    (other, *_), (own, *_) = sorted(set(long_files()) - third(day)), sorted(third(day))
    paths = {"slow": other, "quick": other, "of_the_day": own}
    items = [Mock(path=path, get_closest_marker=lambda _, name=name: name != "quick") for name, path in paths.items()]
    slow, *rest = items
    config = Mock(getoption=lambda _: day)
    pytest_collection_modifyitems(config, items)
    assert items == rest
    config.hook.pytest_deselected.assert_called_once_with(items=[slow])
