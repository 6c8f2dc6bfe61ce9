"""Every method under privacy at sample level: without clipping and noise it is itself, or it is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.methods.run_methods import METHODS
from tests.privacy.test_across_every_method import run
from tests.support import ROOT, saved_weights

pytest.importorskip("dp_accounting")
_COUNTS = "it reads class_counts of a client's data beside the gradient of its samples"
_HELD_OUT = "it reads calibration_loader of a client's data beside the gradient of its samples"
_TWICE = "algorithm.objective uses client.gradients, of a batch as a whole"
_VIEWS = "the data come from a ViewLoader, which cannot draw every sample by itself; take data without views"
_ADDRESSED = "makes each client a message from others' updates, which trainer.privacy neither shows nor accounts for"
REFUSED = {
    **dict.fromkeys(["fedamp", "fedcross", "fedfomo", "fedpac", "pfedhn"], _ADDRESSED),
    **dict.fromkeys(["fedetf", "fedgen", "fedlc", "fedrod", "fedrs", "hfedckd"], _COUNTS),
    "fedala": "its 'ala' reads a client's data beside the steps of its training",  # from its second round on
    **dict.fromkeys(["fedproto", "fedtgp"], "its 'prototypes' reads a client's data beside the steps of its training"),
    **dict.fromkeys(["fedsam", "fedsmoo", "fedspeed", "mofedsam", "per_fedavg"], _TWICE),
    **dict.fromkeys(
        ["afl", "ifca", "qfedavg"], "it reads train_loader of a client's data beside the gradient of its samples"
    ),  # before its training
    "fedbn": "batch norm in 'network.conv1.1' mixes the samples of a batch; take group norm",
    **dict.fromkeys(["suwa", "uwa"], _HELD_OUT),
    **dict.fromkeys(["raf", "scaffold_with_raf"], _VIEWS),
    "local_only": "send nothing; leave it out",
    "pfedme": "algorithm.objective moves client.results['own.'] from step to step",
}
"""Methods that cannot be wrapped, with the reason that is given."""


def private(noise: float = 0.0) -> list[str]:
    """The words of privacy without clipping."""
    found = ["--trainer.privacy", "SampleLevel"]
    for key, value in {"clip_norm": 64, "noise_multiplier": noise, "delta": 0.01}.items():
        found += [f"--trainer.privacy.{key}", str(value)]
    return found


SOON = ("ditto", "fedadam", "fedavg", "fedprox")  # of those that run


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in (*SOON, *REFUSED) else pytest.mark.long) for name in METHODS]
)
def test_a_method_is_itself_with_whole_batches_or_is_refused_by_name(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ["--data.batch_size", "4096"]  # every sample is drawn with probability 1, and no other order matters
    if method in REFUSED:
        with pytest.raises(SystemExit):
            run(method, tmp_path, *private(), *whole)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert REFUSED[method] in said
        return
    found = saved_weights(run(method, tmp_path / "private", *private(), *whole))
    expected = saved_weights(run(method, tmp_path / "plain", *whole))
    assert found.keys() == expected.keys()
    most = 1e-3 if method == "fedfrozen" else 1e-5  # AdamW makes up to 6e-4 of last bits, most for the bias of keys
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=most), name


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"scaffold_with_raf"}))
def test_the_page_says_of_every_method_whether_it_can_be_private(method: str) -> None:
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    table = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| `method/"))
    told = table[f"`method/{METHODS[method].name}`"]
    assert told == ("runs" if method not in REFUSED else f"refused: {REFUSED[method]}")


def test_a_second_pass_over_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("scaffold", tmp_path, *private(), "--algorithm.option", "1")
    assert "reads a client's data beside the steps of its training" in capsys.readouterr().err
