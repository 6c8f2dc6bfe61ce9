"""The shipped files that are made from the code: they are those that the code makes now."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from lit_fed.command.reading.shipped import shipped
from lit_fed.command.refusals.suggest import parameters_of
from lit_fed.command.roots import PARTS, PLACES
from lit_fed.command.table import COMMANDS
from lit_fed.parsing import Parser
from lit_fed.trainer import FederatedTrainer
from tests.support import ROOT, called_by_name

GENERATED = ROOT / "lit_fed" / "generated"
SCHEMA = json.loads((GENERATED / "lit_fed.schema.json").read_text(encoding="utf-8"))
STALE = "write the files of lit_fed/generated/ anew: make generated"


def test_every_setting_of_our_classes_is_in_the_schema() -> None:
    """In a moment, what `test_the_shipped_files_are_those_that_the_code_makes` compares in a minute."""
    lacking = []
    for base in {base for bases in PLACES.values() for base in bases if base is not FederatedTrainer}:
        for cls in called_by_name([base]):
            if cls.__module__.startswith("lit_fed."):
                known = SCHEMA["$defs"].get(f"{cls.__module__}.{cls.__qualname__}", {}).get("properties", {})
                takes = Parser().add_class_arguments(cls, fail_untyped=False)
                lacking += [f"{cls.__name__}.{name}" for name in takes if name not in known]
    settings = str(SCHEMA["else"])
    lacking += [f"trainer.{name}" for name in parameters_of(FederatedTrainer) if f"'{name}': " not in settings]
    assert lacking == [], STALE


def test_commands_classes_and_configuration_files_are_in_the_scripts() -> None:
    script = (GENERATED / "completion.bash").read_text(encoding="utf-8")
    words = set(re.findall(r"[\w./+-]+", script))
    ours = {cls for base in PARTS.values() for cls in called_by_name([base]) if cls.__module__.startswith("lit_fed.")}
    assert {*COMMANDS, *shipped(), *(cls.__name__ for cls in ours)} - words == set(), STALE
    options = {f"--trainer.{name}" for name in parameters_of(FederatedTrainer)}
    assert options - words == set(), STALE


@pytest.mark.long
def test_the_shipped_files_are_those_that_the_code_makes() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    for name in ("torch", "torchvision", "torchmetrics", "lightning", "jsonargparse", "shtab"):
        if version(name) != pinned[name]:
            pytest.skip(f"{name} {version(name)} is not the release of constraints.txt, whose classes they list")
    program = "import json; from website.generated import texts; print(json.dumps(texts()))"  # without tests' classes
    made = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = {path.name: path.read_text(encoding="utf-8") for path in GENERATED.iterdir()}
    same = {name: there.get(name) == text for name, text in json.loads(made).items()}
    assert same == dict.fromkeys(there, True), STALE
