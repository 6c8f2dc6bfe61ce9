"""Every method under privacy: without noise, in full and within the bound, it is itself; or it is refused by name."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import yaml

import lit_fed.methods
from lit_fed.command.cli import main
from tests.methods.run_methods import METHODS, words_of
from tests.support import ROOT, rows, saved_weights

pytest.importorskip("dp_accounting")

_OTHER = "what its server makes of updates is not a mean of what clients send"
_OTHERS = ["afl", "fd_avg", "feddf", "fedex_lora", "fedexp", "fedgen", "fedit"]
_OTHERS += ["fedmd", "fednova", "fedproto", "fedtgp", "flora", "hetlora", "hfedckd"]
_OTHERS += ["ifca", "qfedavg", "suwa", "uwa"]
_ADDRESSED = "makes each client a message from others' updates, which trainer.privacy neither shows nor accounts for"
REFUSED = {
    **dict.fromkeys(["fedamp", "fedcross", "fedfomo", "fedpac", "pfedhn"], _ADDRESSED),
    **dict.fromkeys(_OTHERS, _OTHER),
    "local_only": "send nothing; leave it out",
}
"""Methods that cannot be wrapped, with the reason that is given."""


def run(method: str, root: Path, *more: str, rounds: int = 1) -> Path:
    """Rounds of a method in which all eight clients take part and weigh the same, unless told otherwise."""
    name = yaml.safe_load(METHODS[method].read_text())["algorithm"]["class_path"].rpartition(".")[2]
    weighs = any(
        "weighting" in inspect.signature(cls.__init__).parameters for cls in getattr(lit_fed.methods, name).__mro__
    )
    words = [*words_of(method, root, rounds), *(["--algorithm.weighting", "uniform"] if weighs else [])]
    main(["fit", *words, "--trainer.participation", "FullParticipation", "--trainer.buffers", "local", *more])
    return root / "lightning_logs" / "version_0"


def private(noise: float = 0.0) -> list[str]:
    """The words of privacy without clipping."""
    found = ["--trainer.privacy", "ClientLevel"]
    for key, value in {"clip_norm": 64, "noise_multiplier": noise, "delta": 0.01}.items():
        found += [f"--trainer.privacy.{key}", str(value)]
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_itself_without_noise_or_is_refused_by_name(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if method in REFUSED:
        with pytest.raises(SystemExit):
            run(method, tmp_path, *private())
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert REFUSED[method] in said
        return
    found = saved_weights(run(method, tmp_path / "private", *private()))
    expected = saved_weights(run(method, tmp_path / "plain"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # One unit in the last place, and the grid of the sum, 64 · 2^-40 = 6e-11 a client, over FedDyn's α of 0.1.
        ulp = torch.finfo(torch.float32).eps
        assert torch.allclose(found[name], tensor, rtol=ulp, atol=1e-8), name


def test_a_method_that_stops_sending_some_tensors_is_itself_after_that(tmp_path: Path) -> None:
    """FedFrozen warms up for two rounds; from the third its kernels do not travel."""
    found = saved_weights(run("fedfrozen", tmp_path / "private", *private(), rounds=3))
    expected = saved_weights(run("fedfrozen", tmp_path / "plain", rounds=3))
    for name, tensor in expected.items():
        # AdamW makes up to 6e-4 of last bits, most for the bias of keys, whose gradient is zero but for rounding; the
        # third round alone moves every tensor that travels by 6e-3 and more.
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-3), name


@pytest.mark.parametrize("method", sorted(METHODS.keys() - REFUSED.keys()))
def test_a_method_goes_through_rounds_in_which_nobody_comes(method: str, tmp_path: Path) -> None:
    nobody = ["--trainer.participation", "PoissonParticipation", "--trainer.participation.fraction", "1e-9"]
    folder = run(method, tmp_path, *private(1e-3), *nobody, rounds=3)
    assert [float(row["privacy/epsilon"]) > 0 for row in rows(folder / "metrics.csv")] == [True] * 3
    assert all(tensor.isfinite().all() for tensor in saved_weights(folder).values())


@pytest.mark.parametrize("method", METHODS)
def test_the_page_says_of_every_method_whether_it_can_be_private(method: str) -> None:
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    table = dict(
        line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| `") and ".yaml" in line
    )
    told = table[f"`{METHODS[method].name}`"]
    assert told == ("runs" if method not in REFUSED else f"refused: {REFUSED[method]}")
