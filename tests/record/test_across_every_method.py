"""Every method with contributions: its step on a copy is its step in the run, or it is refused by its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lit_fed.command.cli import main
from tests.methods.run_methods import METHODS, words_of
from tests.support import ROOT, rows

_NONE, _PERSONAL = "has no global model", "a part of every model is personal"
REFUSED = {
    **dict.fromkeys(["fd_avg", "fedamp", "fedfomo", "fedmd", "fedproto", "fedtgp", "ifca", "local_only"], _NONE),
    **dict.fromkeys(["pfedhn", "suwa", "uwa"], _NONE),
    **dict.fromkeys(["fedbn", "fedper", "fedrep", "fedsa_lora", "lg_fedavg"], _PERSONAL),
}
"""Methods without a value of a coalition, with the reason that is given."""


def test_the_page_names_the_refused_methods() -> None:
    text = (ROOT / "docs/contribution.md").read_text(encoding="utf-8")
    for reason in (_NONE, _PERSONAL):
        (line,) = re.findall(rf"^- .*{reason}.*: (.*)\.$", text, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", line)) == {name for name, why in REFUSED.items() if why == reason}


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_contributions_or_is_refused(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = "{class_path: Contribution, init_args: {rule: leave_one_out}}"
    words = [*words_of(method, tmp_path, 2), "--data.val_fraction", "0.2", "--trainer.callbacks", f"[{callback}]"]
    if (reason := REFUSED.get(method)) is not None:
        with pytest.raises(SystemExit):
            main(["fit", *words])
        assert reason in capsys.readouterr().err
        return
    main(["fit", *words])
    found = rows(tmp_path / "lightning_logs/version_0/metrics.csv")
    assert [float(row["contribution/evaluations"]) for row in found] == [6, 6]  # of four clients: n + 2
