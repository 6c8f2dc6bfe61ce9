"""Settings for all tests, and the fourteenth of the long tests that CI runs on a day."""

from datetime import date
from zlib import crc32

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # sums are then the same on every machine
settings.register_profile("any machine", deadline=None)  # a busy one takes longer than the 200 ms that are usual
settings.load_profile("any machine")

DAYS = 14
DAILY = "tests/engine/test_across_processes.py"  # the loop's proofs by two processes


def is_due(nodeid: str, day: date) -> bool:
    """Whether CI runs a long test on a day: `DAILY` always, and of the others each on one of fourteen, by its name."""
    return nodeid.startswith(DAILY) or crc32(nodeid.encode()) % DAYS == day.toordinal() % DAYS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--day", type=date.fromisoformat, metavar="DATE", help="skip long tests that CI runs on other days"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    day = config.getoption("--day")
    if day is not None:
        left = [item for item in items if item.get_closest_marker("long") and not is_due(item.nodeid, day)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
