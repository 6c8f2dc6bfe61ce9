"""Over nodes a run's record is that of the simulation, of which `lit-fed verify` makes use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fed.codecs import CastCodec
from lit_fed.methods import Scaffold
from lit_fed.participation import UniformParticipation
from lit_fed.privacy import SecureSum
from lit_fed.record.check import Check
from tests.federation.support import deploy, simulate, small
from tests.record.test_callback import rounds_of
from tests.support import Points

FEW = UniformParticipation(count=3)
SUMMED = {"secure_sum": SecureSum(3, 8.0)}


@pytest.mark.parametrize(
    ("method", "more"),
    [(Scaffold, {"participation": FEW}), (Scaffold, {"uplink_codec": CastCodec("float16")}), (Scaffold, SUMMED)],
    ids=["scaffold", "codec", "secure sum"],
)
def test_nodes_and_a_simulation_have_one_record(tmp_path: Path, method: Any, more: dict[str, Any]) -> None:
    make = small(data=lambda: Points(4), algorithm=method, max_rounds=3, record=True, **more)
    simulate(make, tmp_path / "one")
    made = deploy(make, tmp_path / "nodes", [[0], [1, 2], [3]])
    one, other = rounds_of(tmp_path / "one"), rounds_of(tmp_path / "nodes")
    for line in (*one, *other):  # of metrics only those of the global model are measured in both
        line["metrics"] = {name: value for name, value in line["metrics"].items() if name.startswith("global/")}
    assert len(one) == 3
    assert one == other
    assert list(Check(made.log_dir).run()) == []
