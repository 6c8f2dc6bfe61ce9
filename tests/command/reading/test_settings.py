"""Refusals of constructed objects, by key, file and line where a file set the value, else by Python's name."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.callbacks import EarlyStopping
from lit_fed.command.reading.settings import Settings
from lit_fed.command.refusals.suggest import parameters_of
from lit_fed.command.roots import PLACES, import_named
from lit_fed.data import Dirichlet
from lit_fed.errors import ConfigError
from lit_fed.methods import KD
from lit_fed.robust import Krum
from tests.command.support import command, error_of
from tests.support import called_by_name

REFUSED: list[tuple[type, tuple[str, ...], str, float, str, str]] = [
    (Dirichlet, ("data", "partition"), "alpha", -1.0, "Dirichlet.alpha", "it must be above 0"),
    (KD, ("algorithm", "regularizer"), "temperature", -1.0, "KD.temperature", "it must be above 0"),
    (EarlyStopping, ("trainer", "callbacks"), "patience", -3, "EarlyStopping.patience", "it must be at least 1"),
    (Krum, ("trainer", "aggregation"), "attackers", -3, "trainer.aggregation.attackers", "it must be at least 0"),
]


@pytest.mark.parametrize(("cls", "place", "name", "value", "in_python", "needed"), REFUSED)
def test_a_refusal_of_an_object_begins_with_its_key_file_and_line_and_in_python_with_its_own_name(
    cls: type, place: tuple[str, ...], name: str, value: float, in_python: str, needed: str, capsys: Any
) -> None:
    others = {"monitor": "global/acc"} if cls is EarlyStopping else {}
    with pytest.raises(ConfigError, match=re.escape(f"{in_python} is {value}; {needed}")):
        cls(**others, **{name: value})

    key, plus = ".".join(place), "+" * (place[-1] == "callbacks")
    settings = {**others, name: value}
    options = [f"--{key}{plus}={cls.__name__}", *(f"--{key}.{name}={value}" for name, value in settings.items())]
    assert error_of(command("fit", *options), capsys) == f"{key}.{name} is {value}; {needed}"

    made: Any = {"class_path": cls.__name__, "init_args": settings}
    section, part = place
    content = {section: {part: [made] if plus else made}}
    if section == "algorithm":
        content = {section: {"class_path": "FedAvg", "init_args": content[section]}}
    text = yaml.safe_dump(content, sort_keys=False)
    Path("my.yaml").write_text(text)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if f" {name}: " in line)
    told = error_of(command("fit", "-c", "my.yaml"), capsys)
    assert told == f"config file my.yaml, line {line}: {key}.{name} is {value}; {needed}"


def refusals() -> list[tuple[str, str, str]]:
    """The place and the name of every number of a public class that it refuses to have so low, and the refusal."""
    import_named()
    found = []
    for place, bases in PLACES.items():
        for cls in called_by_name(bases) if place != "trainer" else bases:
            needed = {name for name, one in parameters_of(cls).items() if one.default is inspect.Parameter.empty}
            for name, one in parameters_of(cls).items():
                if str(one.annotation).startswith(("int", "float")) and needed <= {name}:
                    with contextlib.suppress(Exception):
                        try:
                            cls(**{name: -(10**6)})
                        except ConfigError as error:
                            found.append((cls.__name__, f"{place}.{name}".replace(".init_args", ""), str(error)))
    return found


def test_a_refusal_of_every_public_class_becomes_its_key_with_file_and_line() -> None:
    """All but those that are about another setting, or that a part refuses which the class makes from the setting."""
    located = 0
    for cls, key, line in refusals():
        *owner, name = key.split(".")
        if not line.startswith((f"{key} is ", f"{cls}.{name} is ")):
            continue
        read = Settings()
        content = {name: -(10**6)} if owner == ["trainer"] else {"class_path": cls, "init_args": {name: -(10**6)}}
        read.put(owner, content, {tuple(key.split(".")): "my.yaml, line 3"})
        assert read.located(line).startswith(f"my.yaml, line 3: {key} is ")
        located += 1
    assert located > 250
