"""The workflows of .github call what a contributor calls, on the Pythons that pyproject.toml declares."""

import re
import tomllib
from datetime import date, timedelta
from unittest.mock import Mock

import pytest
import yaml

from tests.conftest import DAILY, long_files, pytest_collection_modifyitems, third
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
