"""The JSON schema accepts every file that we ship, and refuses wrong ones by their key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from lit_fed.parsing import load
from tests.command.support import settings_of
from tests.support import ROOT

jsonschema = pytest.importorskip("jsonschema")
SHIPPED = sorted([*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")])


@pytest.fixture(scope="module")
def check() -> Any:
    """The shipped schema, which `tests/test_generated.py` makes anew."""
    made = json.loads((ROOT / "lit_fed/generated/lit_fed.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def leaves(errors: Any) -> Iterator[str]:
    """Where each error is, and its words; of alternatives, those of each."""
    for error in errors:
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        yield from leaves(error.context)


def test_every_shipped_file_is_accepted(check: Any) -> None:
    assert len(SHIPPED) > 200
    wrong = {path: [*leaves(check.iter_errors(load(path.read_text(encoding="utf-8"))))] for path in SHIPPED}
    assert {path.relative_to(ROOT): told[:4] for path, told in wrong.items() if told} == {}


WRONG = {
    "trainer: {max_epochs: 3}": "max_epochs",
    "trainer: {max_rounds: three}": "trainer.max_rounds",
    "trainer: {max_rounds: 1.5}": "trainer.max_rounds",
    "trainer: {buffers: mean}": "trainer.buffers",
    "trainer: {executor: parallel}": "trainer.executor",
    "trainer: {enable_pictures: 3}": "trainer.enable_pictures",
    "trainer: {participation: {class_path: Uniform}}": "trainer.participation.class_path",
    "trainer: {participation: {class_path: UniformParticipation, init_args: {number: 5}}}": "number",
    "trainer: {participation: {class_path: UniformParticipation, count: 5}}": "count",
    "trainer: {protocols: GlobalTest}": "trainer.protocols",
    "trainer: {protocols: [{class_path: Global}]}": "trainer.protocols.0.class_path",
    "trainer: {privacy: {class_path: ClientLevelDP, init_args: {noise: 1}}}": "noise",
    "algorithm: FedProxx": "algorithm",
    "algorithm: {class_path: FedProx, init_args: {muu: 0.1}}": "muu",
    "algorithm: {class_path: lit_fed.methods.FedProx, init_args: {mu: [0.1]}}": "algorithm.init_args.mu",
    "algorithms: {class_path: FedProx}": "algorithms",
    "data: {class_path: Digits, init_args: {clients: 20}}": "clients",
    "data: {class_path: Digits, init_args: {partition: {class_path: Dirichlet, init_args: {alfa: 1}}}}": "alfa",
    "model: {class_path: Classifier, init_args: {net: mlp}}": "net",
    "model: {class_path: Classifier, init_args: {optimizer: {class_path: torch.optim.SGD, init_args: {r: 1}}}}": "'r'",
    "model: {optimizer: {lr: fast}}": "model.optimizer.lr",
    "data: {num_clients: many}": "data.num_clients",
    "trainer: {participation: {count: few}}": "trainer.participation.count",
    "{rows: {a: {lable: A}}, columns: {}}": "lable",
    "{profiles: {pocket: {row: {}}}, rows: {}}": "row",
    "{simulate: {class_path: x.Figure}, seed: 1}": "seed",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_with_its_key_named(check: Any, text: str) -> None:
    told = list(leaves(check.iter_errors(load(text))))
    assert any(WRONG[text] in line for line in told), told


def test_a_class_of_another_package_is_accepted_by_its_import_path(check: Any) -> None:
    assert check.is_valid(yaml.safe_load("algorithm: {class_path: mine.Method, init_args: {what: 1}}"))


WITHOUT_CLASS = [
    "model: {optimizer: {lr: 0.5}}",
    "model: {optimizer: {class_path: SGD, init_args: {lr: 0.5}}}",
    "model: {optimizer: Adam, network: mlp}",
    "model: {init_args: {network: mlp}}",
    "data: {num_clients: 10, partition: {alpha: 0.5}}",
    "algorithm: {mu: 0.5}",
    "algorithm: FedAvg",
    "trainer: {participation: {count: 3}}",
]


@pytest.mark.parametrize("text", WITHOUT_CLASS)
def test_settings_whose_class_another_file_names_pass_as_they_do_in_a_run(
    check: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text, encoding="utf-8")
    settings_of(["fit", "-c", "quickstart.yaml", "-c", "method/fedprox.yaml", "-c", str(mine)], capsys)
    assert [*leaves(check.iter_errors(load(text)))] == []


def test_the_command_prints_it(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main(["schema"])
    told = capsys.readouterr().out
    assert json.loads(told) == check.schema
    assert len(told.encode()) < 1_000_000
    assert check.schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert "FedProx" in json.dumps(check.schema["$defs"]["Algorithm"])
