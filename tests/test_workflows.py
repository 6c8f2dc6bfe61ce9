"""The workflows of .github call what a contributor calls, on the Pythons that pyproject.toml declares."""

import re
import tomllib
from datetime import date, timedelta
from unittest.mock import Mock

import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import DAILY, DAYS, is_due, pytest_collection_modifyitems
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


@given(st.text(), st.dates(max_value=date(9999, 12, 1)))
def test_seven_days_in_a_row_run_every_long_test_once(name: str, first: date) -> None:
    days = [is_due(name, first + timedelta(days=later)) for later in range(DAYS)]
    assert sum(days) == 1
    assert all(is_due(f"{DAILY}::{name}", first + timedelta(days=later)) for later in range(DAYS))


def test_ci_runs_the_long_tests_of_today() -> None:
    assert '-m long --day "$(date +%F)"\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert (ROOT / DAILY).is_file()


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
