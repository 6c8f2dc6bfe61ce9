"""The workflows of .github call what a contributor calls, on the Pythons that pyproject.toml declares."""

import re
import shlex
import subprocess
import sys
import tomllib
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import DAILY, DAYS, is_due, pytest_collection_modifyitems
from tests.support import ROOT

WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")}
RELEASE = yaml.safe_load(WORKFLOWS["release"])


def commands(steps: list[dict[str, Any]]) -> list[str]:
    """The commands of a job's steps."""
    return [step["run"] for step in steps if "run" in step]


def recipe(target: str, *settings: str) -> list[str]:
    """The commands that make would run for a target."""
    words = ["make", "--dry-run", "--no-print-directory", target, *settings]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", "").splitlines()


def test_every_declared_python_is_checked_by_ci_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [found[1] for one in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]
    job = yaml.safe_load(WORKFLOWS["check"])["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == declared == ["3.11", "3.12", "3.13"]
    assert commands(job["steps"]) == [".ci/run"]


def test_the_lowest_and_the_newest_versions_are_tested_every_week() -> None:
    weekly = yaml.safe_load(WORKFLOWS["weekly"])
    (schedule,) = weekly[True]["schedule"]  # YAML 1.1 reads the key `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* 1", schedule["cron"])  # one minute of one hour on Mondays
    job = weekly["jobs"]["versions"]
    assert commands(job["steps"]) == ["make test-${{ matrix.versions }}"]
    assert {one["versions"] for one in job["strategy"]["matrix"]["include"]} == {"floors", "newest"}


def test_the_targets_of_the_weekly_workflow_run_the_quickstart_and_the_everyday_tests() -> None:
    for target in ("test-floors", "test-newest"):
        *_, quickstart, tests = recipe(target)
        assert quickstart.endswith("cli.py fit --config configs/quickstart.yaml")
        assert tests.endswith('-m pytest --numprocesses auto --dist loadscope -m "not long"')


def test_the_newest_versions_are_tested_with_every_extra_and_pre_releases() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (installed,) = re.findall(r"--pre --upgrade .*--editable '\.\[([\w,]+)\]'", "\n".join(recipe("test-newest")))
    assert sorted(installed.split(",")) == sorted(extras)


def test_the_lowest_versions_are_tested_with_every_extra_for_users() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    commands = "\n".join(recipe("test-floors", "FLOORS_VENV=.venv-not-there"))
    (installed,) = re.findall(r"--constraint requirements/floors.txt --editable '\.\[([\w,]+)\]'", commands)
    assert sorted(installed.split(",")) == sorted(extras.keys() - {"references", "docs"})


def test_both_distributions_and_the_site_are_built_and_the_site_of_main_is_deployed() -> None:
    build, site = RELEASE["jobs"]["build"], RELEASE["jobs"]["site"]
    tools, *rest = commands(build["steps"])
    assert tools == "python -m pip install build twine"
    assert rest == ["python -m build --outdir dist", "python -m twine check --strict dist/*", "make docs"]
    assert (site["if"], site["needs"]) == ("github.ref == 'refs/heads/main'", "build")
    assert [step["uses"].partition("@")[0] for step in site["steps"]] == ["actions/deploy-pages"]


def test_both_distributions_run_on_every_declared_python_without_the_repository() -> None:
    job = RELEASE["jobs"]["clean"]
    assert job["needs"] == "build"
    pythons = yaml.safe_load(WORKFLOWS["check"])["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert job["strategy"]["matrix"] == {"python": pythons, "file": ["*.whl", "*.tar.gz"]}
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
    name = "dist/lit_fed-${GITHUB_REF_NAME#v}"
    assert checked == f'ls "{name}-py3-none-any.whl" "{name}.tar.gz"'
    *_, last = job["steps"]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert last["with"] == {"attestations": True}  # and no password: the index trusts the workflow's token


def test_only_publishing_and_deploying_may_do_more_than_read() -> None:
    for text in WORKFLOWS.values():
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        assert {name for name, job in workflow["jobs"].items() if "permissions" in job} <= {"publish", "site"}
    assert RELEASE["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert RELEASE["jobs"]["site"]["permissions"] == {"pages": "write", "id-token": "write"}
    assert not any("secrets." in text for text in WORKFLOWS.values())


@given(st.text(), st.dates(max_value=date(9999, 12, 1)))
def test_seven_days_in_a_row_run_every_long_test_once(name: str, first: date) -> None:
    days = [is_due(name, first + timedelta(days=later)) for later in range(DAYS)]
    assert sum(days) == 1
    assert all(is_due(f"{DAILY}::{name}", first + timedelta(days=later)) for later in range(DAYS))


def test_ci_runs_the_long_tests_of_today() -> None:
    assert '-m long --day "$(date +%F)"\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert (ROOT / DAILY).is_file()


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (None, ""),
        ("echo 'pyenv: python3.13: command not found' >&2; exit 127", ""),
        ("exit 126", ""),  # as for a file that this machine cannot run
        (f"exec {sys.executable} -c \"import sys; sys.modules['ensurepip'] = None; $2\"", ""),  # Debian's, without venv
        (f'exec {sys.executable} "$@"', sys.executable),
        (f'[ "$PYENV_VERSION" = 3.13 ] && exec {sys.executable} "$@"', sys.executable),
    ],
    ids=["none", "shim", "broken", "without venv", "works", "works by pyenv"],
)
def test_ci_takes_a_newest_python_only_if_it_runs(tmp_path: Path, program: str | None, found: str) -> None:
    """Run the lines of `.ci/run` that look for it, with this command in the path alone."""
    lines = "\n".join(re.findall("^(?:runs|newest)=.*$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE))
    if program is not None:
        (tmp_path / "python3.13").write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
        (tmp_path / "python3.13").chmod(0o755)
    script = f'set -euo pipefail\nPATH={shlex.quote(str(tmp_path))}\n{lines}\necho "found $newest"'
    done = subprocess.run(["/bin/bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"found {found}\n"


def test_a_day_leaves_out_long_tests_of_other_days_and_no_quick_ones() -> None:
    day = date(2026, 11, 27)
    other, own = (next(name for name in map(str, range(100)) if is_due(name, day) is due) for due in (False, True))
    marks = {(other, "slow"): True, (other, "quick"): False, (own, "slow"): True}
    items = [Mock(nodeid=name, get_closest_marker=lambda _, long=long: long) for (name, _), long in marks.items()]
    slow, *rest = items
    config = Mock(getoption=lambda _: day)
    pytest_collection_modifyitems(config, items)
    assert items == rest
    config.hook.pytest_deselected.assert_called_once_with(items=[slow])
