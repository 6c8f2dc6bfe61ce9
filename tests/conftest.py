"""Settings for all tests, and the third of the long tests that CI runs on a day."""

from datetime import date
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # sums are then the same on every machine
settings.register_profile("any machine", deadline=None)  # a busy one takes longer than the 200 ms that are usual
settings.load_profile("any machine")

HERE = Path(__file__).parent
DAILY = (  # the loop's proofs by two processes, and every method's
    HERE / "engine" / "test_across_processes.py",
    HERE / "methods" / "test_across_every_method.py",
)


def long_files() -> list[Path]:
    """The files with long tests, sorted."""
    return [path for path in sorted(HERE.rglob("test_*.py")) if "mark.long" in path.read_text(encoding="utf-8")]


def third(day: date) -> set[Path]:
    """Return the files whose long tests CI runs on a day: `DAILY`, and every third one of the others.

    Whole files, so that their tests share fixtures; the list is that of the whole suite, however pytest was called.
    """
    others = [path for path in long_files() if path not in DAILY]
    return {*DAILY, *others[day.toordinal() % 3 :: 3]}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--third", type=date.fromisoformat, metavar="DATE", help="skip long tests that CI runs on other days"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    day = config.getoption("--third")
    if day is not None:
        others = set(long_files()) - third(day)
        left = {item for item in items if item.get_closest_marker("long") and item.path in others}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
