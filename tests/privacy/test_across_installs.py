"""Private runs where the extra `privacy` is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fed.errors import ConfigError
from tests.privacy.support import private, uniform
from tests.support import fit


@pytest.mark.parametrize("noise", [{"noise_multiplier": 1.0}, {"noise_multiplier": None, "epsilon": 8.0}])
def test_without_the_accountant_a_run_ends_before_its_folder_is_made(
    noise: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # an import of it fails, as where it is not installed
    key = tmp_path / "run.key"
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, algorithm=uniform(), **private(0.5, key_file=str(key), **noise))
    assert str(caught.value) == (
        "trainer.privacy needs dp-accounting, which is not installed; pip install 'lit-fed[privacy]'"
    )
    assert list(tmp_path.iterdir()) == []
