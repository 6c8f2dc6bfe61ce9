"""Names of parameters, by module and pattern."""

from __future__ import annotations

import pytest

from lit_fed.errors import ConfigError
from lit_fed.patterns import chosen_names

NAMES = (
    "base.encoder.0.lora_A.weight",
    "base.encoder.0.lora_B.weight",
    "base.encoder.1.lora_A.weight",
    "base.encoder.1.lora_B.weight",
    "classifier.weight",
    "classifier.bias",
    "classifiers.odd[0]",
)


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ([], ()),
        (["classifier"], NAMES[4:6]),  # the module, and not classifiers
        (["classifier.bias", "classifier.weight"], NAMES[4:6]),  # in the model's order
        (["*lora_B*"], (NAMES[1], NAMES[3])),
        (["*lora_B*", "classifier.*"], (NAMES[1], NAMES[3], NAMES[4], NAMES[5])),
        (["base.encoder.?"], NAMES[:4]),  # modules by a pattern
        (["base.*.lora_A"], (NAMES[0], NAMES[2])),
        (["base.encoder.[0]*"], NAMES[:2]),
        (["classifiers.odd[0]"], NAMES[6:]),  # itself, whatever brackets mean
        (["*"], NAMES),
    ],
)
def test_names_modules_and_patterns_choose_parameters(patterns: list[str], chosen: tuple[str, ...]) -> None:
    assert chosen_names(patterns, NAMES, "algorithm.personal") == chosen


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("clasifier", "did you mean classifier or classifiers or"),
        ("*lora_C*", "did you mean base.encoder.0.lora_B or base.encoder.0.lora_A?"),
        ("lora_B", "did you mean base.encoder.0.lora_B or base.encoder.0.lora_A?"),
        ("base.encoder.0.lora_B.weights", "did you mean base.encoder.0.lora_B.weight or"),
        ("LORA_B", "there are base, base.encoder, base.encoder.0, …"),
    ],
)
def test_what_chooses_nothing_is_told_the_nearest_names(pattern: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen_names(["classifier", pattern], NAMES, "algorithm.personal")
    said = f"algorithm.personal is {pattern!r}, and no parameter is called or begins so; {hint}"
    assert str(error.value).startswith(said)
