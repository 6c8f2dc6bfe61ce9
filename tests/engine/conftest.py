"""Fixtures of the engine's tests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's own, in which a file with modules lies."""
    shutil.copy(ROOT / "tests" / "strangers.py", tmp_path / "strangers_in_cwd.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("strangers_in_cwd", None)
