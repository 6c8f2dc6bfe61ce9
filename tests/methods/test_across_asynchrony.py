"""Every method in an asynchronous federation: it runs, or it is refused with the reason; so do rules and privacy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.participation import Asynchronous, Speeds
from lit_fed.privacy import ClientLevel
from lit_fed.robust import Krum, Median
from tests.methods.run_methods import METHODS, words_of
from tests.support import ROOT, Points, fit, rows, weights

REFUSED = {
    "fd_avg",
    "fedcross",
    "feddf",
    "fedex_lora",
    "fedfrozen",
    "fedgen",
    "fedit",
    "fedmd",
    "flora",
    "hetlora",
    "hfedckd",
    "suwa",
    "uwa",
}
"""Methods that need updates which start from one model."""


def uneven(**kwargs: Any) -> Asynchronous:
    return Asynchronous(**({"concurrency": 6, "buffer": 3, "speeds": Speeds(sigma=1.0)} | kwargs))


def test_the_page_says_which_methods_run() -> None:
    text = (ROOT / "docs/asynchrony.md").read_text(encoding="utf-8")
    table = re.search(r"\| `configs/method/` \| asynchronously \|\n.*?\n((?:\|.*\n)+)", text)
    assert table is not None
    said = {name: cells[-1].partition(":")[0] for line in table[1].splitlines()
            for cells in [line.strip("| ").split(" | ")] for name in re.findall(r"`(\w+)`", cells[0])}  # fmt: skip
    methods = [path.stem for path in (ROOT / "configs/method").glob("*.yaml")]
    assert said == {name: "refused" if name in REFUSED else "runs" for name in methods}


SOON = ("fedadam", "fedasync", "fedavg", "fedbuff", "fedper", "fedprox", "scaffold")  # of those that run


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in (*SOON, *REFUSED) else pytest.mark.long) for name in METHODS]
)
def test_a_method_runs_or_is_refused_with_the_reason(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", *words_of(f"{method.replace('scaffold_with_raf', 'raf')}_asynchronous", tmp_path, 3)]
    if method in REFUSED:
        with pytest.raises(SystemExit):
            main(words)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert re.search(
            "algorithm .* needs (updates that start from one model, which in an asynchronous federation they do not; "
            "choose another trainer.participation than Asynchronous|the probability)", said
        )  # fmt: skip
        return
    main(words)
    table = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert [row["participation/count"] for row in table] == ["2", "2", "2"]
    assert 0 < float(table[0]["clock/virtual_s"]) <= float(table[-1]["clock/virtual_s"])


def test_a_rule_counts_the_buffer_and_not_the_concurrency(tmp_path: Path) -> None:
    """Krum bears f of n ≥ 2 f + 3 updates: of the buffer's 3 none, of 5 one."""
    with pytest.raises(ConfigError, match="needs cohorts of at least 5 clients, and a round has 3"):
        fit(tmp_path, None, Points(8), None, participation=uneven(), aggregation=Krum(attackers=1))
    fit(tmp_path, None, Points(8), None, participation=uneven(buffer=5), aggregation=Krum(attackers=1))


def test_a_rule_sees_movements_from_the_version_that_each_client_started_from(tmp_path: Path) -> None:
    """Clients 0, 1 and 2 as in `tests/methods/test_fedbuff.py`: step 1 adds the median of (1, 0) and (3/4, 0)."""
    path = tmp_path / "trace.csv"
    path.write_text("client,seconds\n0,2\n1,3\n2,4\n")
    made = fit(
        tmp_path, None, Points(3), FedAvg("uniform"), participation=Asynchronous(3, 2, speeds=Speeds(trace=str(path))),
        aggregation=Median(),
    )  # fmt: skip
    # step 0: the median of (1, 0) and (0, 2) is their mean (0.5, 1), as of any two; step 1: + (0.875, 0)
    assert weights(made)["network.weight"].tolist() == [[1.375, 1.0]]


def test_privacy_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    with pytest.raises(ConfigError, match="Asynchronous, which lets each client work in its own time"):
        fit(
            tmp_path, None, Points(8), FedAvg("uniform"), participation=uneven(),
            privacy=ClientLevel(clip_norm=1.0, noise_multiplier=1.0, delta=0.01),
        )  # fmt: skip


def test_bytes_of_the_payload_take_time_on_a_slow_line(tmp_path: Path) -> None:
    """Two float32 weights, 8 bytes down at 4 bytes/s and up at 2 bytes/s: 1 + 2 + 4 s; FedAvg's codec-less payload."""
    path = tmp_path / "trace.csv"
    path.write_text("client,seconds,down_bytes_per_s,up_bytes_per_s\n0,1,4,2\n1,1,,\n")
    made = fit(tmp_path, None, Points(2), None, participation=Asynchronous(2, 1, speeds=Speeds(trace=str(path))))
    durations = [made.participation.duration(client_id) for client_id in range(2)]
    assert durations == [7.0, 1.0]
    assert [one.ended for step in range(2) for one in made.participation.plan(step)] == [1.0, 2.0]
