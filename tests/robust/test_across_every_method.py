"""Every method under every rule: it runs, and without attackers the mean's rules are the mean; or it is refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import yaml

import lit_fed.methods
from lit_fed.command.cli import main
from tests.methods.run_methods import METHODS, words_of
from tests.support import ROOT, saved_weights

_OTHER = "its server does not average what clients send"
_OTHERS = ["afl", "fd_avg", "fedamp", "fedcross", "feddf", "fedex_lora", "fedexp", "fedfomo"]
_OTHERS += ["fedgen", "fedit", "fedmd", "fednova", "fedpac", "fedproto", "fedtgp", "flora"]
_OTHERS += ["hetlora", "hfedckd", "ifca", "pfedhn", "qfedavg", "suwa", "uwa"]
REFUSED = {
    **dict.fromkeys(_OTHERS, _OTHER),
    "local_only": "send nothing; leave it out",
}
"""Methods without a rule, with the reason that is given."""

NEAREST = "{class_path: NNM, init_args: {attackers: 2}}"
RULES = {
    "mean": "{class_path: MultiKrum, init_args: {attackers: 0}}",  # n − 0 of n vectors are the mean
    "median": "Median",
    "trimmed_mean": "{class_path: TrimmedMean, init_args: {attackers: 2}}",
    "krum": "{class_path: Krum, init_args: {attackers: 2}}",
    "krum_byzfl": "{class_path: Krum, init_args: {attackers: 3, definition: byzfl}}",
    "multi_krum": f"{{class_path: MultiKrum, init_args: {{attackers: 2, before: {NEAREST}}}}}",
    "geometric_median": "{class_path: GeometricMedian, init_args: {before: Bucketing}}",
    "clipping": "{class_path: CentredClipping, init_args: {radius: 1.0}}",
    "bounding": "{class_path: NormBounding, init_args: {norm: 1.0}}",
}


def test_the_page_says_which_methods_run_under_a_rule() -> None:
    text = (ROOT / "docs/robustness.md").read_text(encoding="utf-8")
    table = re.search(r"\| `configs/method/` \| under every rule \|\n.*?\n((?:\|.*\n)+)", text)
    assert table is not None
    said = {name: cells[-1] for line in table[1].splitlines() for cells in [line.strip("| ").split(" | ")]
            for name in re.findall(r"`(\w+)`", cells[0])}  # fmt: skip
    reasons = {name: "its clients send nothing" if name == "local_only" else REFUSED[name] for name in REFUSED}
    methods = [path.stem for path in (ROOT / "configs/method").glob("*.yaml")]
    assert said == {name: f"refused: {reasons[name]}" if name in REFUSED else "runs" for name in methods}


def run(method: str, root: Path, *more: str) -> Path:
    """One round of a method in which all eight clients take part and weigh the same."""
    name = yaml.safe_load(METHODS[method].read_text())["algorithm"]["class_path"].rpartition(".")[2]
    weighs = any(
        "weighting" in inspect.signature(cls.__init__).parameters for cls in getattr(lit_fed.methods, name).__mro__
    )
    words = [*words_of(method, root, 1), *(["--algorithm.weighting", "uniform"] if weighs else [])]
    main(["fit", *words, "--trainer.participation", "FullParticipation", "--trainer.buffers", "local", *more])
    return root / "lightning_logs" / "version_0"


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_under_every_rule_or_is_refused(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, rule in RULES.items():
        if method in REFUSED:
            with pytest.raises(SystemExit):
                run(method, tmp_path / name, "--trainer.aggregation", rule)
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert REFUSED[method] in said
            return  # every rule asks the same of a method
        found[name] = saved_weights(run(method, tmp_path / name, "--trainer.aggregation", rule))
        assert all(tensor.isfinite().all() for tensor in found[name].values() if tensor.is_floating_point())
    expected = saved_weights(run(method, tmp_path / "plain"))
    for name, tensor in expected.items():
        # Rules add float64 differences to the broadcast: a unit in the last place of float32, over FedDyn's α of .1.
        ulp = torch.finfo(torch.float32).eps
        assert torch.allclose(found["mean"][name], tensor, rtol=ulp, atol=1e-7), name


@pytest.mark.parametrize("attack", ["SignFlip", "ALIE", "LabelFlip"])
@pytest.mark.parametrize("method", ["scaffold", "fednova", "fedexp", "fedper", "feddyn"])
def test_an_attack_goes_around_any_method(method: str, attack: str, tmp_path: Path) -> None:
    found = saved_weights(run(method, tmp_path, "--trainer.attack", attack, "--trainer.attack.fraction", "0.25"))
    assert all(tensor.isfinite().all() for tensor in found.values() if tensor.is_floating_point())
