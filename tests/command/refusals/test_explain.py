"""Settings that the installed parser refuses, reduced to one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentError
from jsonargparse.typing import PositiveInt
from lightning import LightningModule

from lit_fed.callbacks import Callback
from lit_fed.command.reading.parts import add_parts
from lit_fed.command.refusals.explain import explain
from lit_fed.command.table import COMMANDS
from lit_fed.parsing import Parser
from tests.command.support import LR, QUICKSTART, command, error_of


def written(text: str) -> str:
    Path("bad.yaml").write_text(text)
    return "bad.yaml"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--trainer.max", "4"],
            "unknown option --trainer.max; did you mean --trainer.max_rounds or --trainer.max_time?",
        ),
        (["--trainer.max=4"], "unknown option --trainer.max; did you mean --trainer.max_rounds or --trainer.max_time?"),
        (["--trainr.max_rounds", "4"], "unknown option --trainr.max_rounds; did you mean --trainer.max_rounds?"),
        (["--num_clients", "4"], "unknown option --num_clients; did you mean --data.init_args.num_clients?"),
        (["stray"], "unexpected word 'stray'; settings are given as --key value"),
        (
            ["--model.networks", "mlp"],
            "unknown key model.init_args.networks: Classifier has no such setting; did you mean network?",
        ),
        (
            ["--data.init_args.partition.init_args.alfa", "1"],
            "unknown key data.init_args.partition.init_args.alfa: Dirichlet has no such setting; did you mean alpha?",
        ),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.patienc", "4"],
            "unknown key trainer.callbacks.init_args.patienc: EarlyStopping has no such setting; "
            "did you mean patience?",
        ),
        (["--model", "Classifer"], "model: there is no LightningModule named 'Classifer'; did you mean Classifier?"),
        (
            ["--model", "lit_fed.Classifer"],
            "model: there is no LightningModule named 'lit_fed.Classifer'; did you mean",
        ),
        (["--algorithm", "FedAvgg"], "algorithm: there is no Algorithm named 'FedAvgg'; did you mean FedAvg?"),
        (["--algorithm", "SCAFFOLD"], "did you mean Scaffold?"),  # as the papers write them
        (["--algorithm", "MOON"], "did you mean Moon?"),
        (["--algorithm", "LG-FedAvg"], "did you mean LGFedAvg?"),
        (["--algorithm", "Classifier"], "algorithm: there is no Algorithm named 'Classifier'"),
        (
            ["--data", "collections.OrderedDict"],
            "data: collections.OrderedDict does not derive from FederatedDataModule",
        ),
        (["--data.init_args.partition", "Dirchlet"], "no Partition named 'Dirchlet'; did you mean Dirichlet?"),
        (
            ["--model.init_args.optimizer", "torch.optim.SDG"],
            "model.init_args.optimizer: there is no Optimizer named 'torch.optim.SDG'; did you mean torch.optim.SGD?",
        ),
        (
            ["--model.init_args.lr_scheduler", "CosineAnealingLR"],
            "there is no LRScheduler named 'CosineAnealingLR'; did you mean CosineAnnealingLR?",
        ),
        (["--model.init_args.lr_scheduler", "StepLR"], "model.init_args.lr_scheduler.init_args.step_size is missing"),
        (["--model.adapter.train", "1.5"], "model.init_args.adapter.init_args.train: expected a list, not 1.5"),
        (["--trainer.max_rounds", "many"], "trainer.max_rounds: expected a whole number, not many"),
        (["--trainer.max_rounds", "4.5"], "trainer.max_rounds: expected a whole number, not 4.5"),
        (["--trainer.evaluate_on", "tset"], "trainer.evaluate_on: expected 'val' or 'test', not tset"),
        (["--trainer.logger", "maybe"], "trainer.logger: expected true or false, a list or a class, not maybe"),
        (["--trainer.gradient_clip_val", "big"], "trainer.gradient_clip_val: expected a number, not big"),
        (["--model.init_args.optimizer.init_args.nesterov", "3"], "init_args.nesterov: expected true or false, not 3"),
        ([LR, "fast"], "model.init_args.optimizer.init_args.lr: expected a number, not fast"),
        (
            ["--trainer.callbacks", "EarlyStopping"],
            "trainer.callbacks: expected a list, not EarlyStopping; write trainer.callbacks+=EarlyStopping",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_bad_option_is_named_with_what_was_meant(args, expected, capsys):
    told = error_of(command("fit", *args), capsys)
    assert expected in told
    assert "config file" not in told, "it is an option's mistake"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer: {max_round: 4}", "unknown key trainer.max_round; did you mean trainer.max_rounds?"),
        ("max_rounds: 4", "unknown key max_rounds; did you mean trainer.max_rounds?"),
        ("trainer: {num_clients: 4}", "unknown key trainer.num_clients; did you mean data.init_args.num_clients?"),
        ("fit: {trainer: {max_rounds: 4}}", "unknown key fit.trainer.max_rounds; did you mean trainer.max_rounds?"),
        (
            "model: {class_path: Classifier, max_rounds: 4}",
            "model: max_rounds cannot stand beside class_path; did you mean trainer.max_rounds?",
        ),
        (
            "model: {class_path: Classifier, network: mlp}",
            "model: network cannot stand beside class_path; put it into model.init_args",
        ),
        (
            "model: {class_path: Classifier, init_args: {lr: 1}}",
            "unknown key model.init_args.lr: Classifier has no such setting; "
            "did you mean model.init_args.optimizer.init_args.lr?",
        ),
        (
            "model: {class_path: Classifier, init_args: {optimizer: {class_path: torch.optim.SGD, "
            "init_args: {learning_rate: 1}}}}",
            "unknown key model.init_args.optimizer.init_args.learning_rate: SGD has no such setting; "
            "its settings are lr, momentum,",
        ),
        ("model: {class_path: Classifer}", "model: there is no LightningModule named 'Classifer'; did you mean"),
        ("model: [1, 2]", "model is a list; it must hold class_path and init_args"),
        ("algorithm: {class_path: [FedAvg]}", "algorithm: a class is needed; give class_path and init_args"),
        ("algorithm: {class_path: ..}", ".. cannot be imported: "),
        ("trainer: 3", "trainer is 3; it must hold settings, such as max_rounds"),
        (
            "data: {class_path: Table, init_args: {path: a.csv, target: b, class_names: [1, 0]}}",
            "data.init_args.class_names: expected a text, not 1; put it in quotation marks",
        ),
        (
            "data: {class_path: Table, init_args: {path: a.csv, target: b, class_names: [yes, no]}}",
            "data.init_args.class_names: expected a text, not True; put it in quotation marks",
        ),
        ("trainer: {max_rounds: many}", "trainer.max_rounds: expected a whole number, not many"),
        (
            "trainer: {callbacks: [{class_path: lightning.pytorch.loggers.CSVLogger}]}",
            "trainer.callbacks: lightning.pytorch.loggers.CSVLogger does not derive from Callback",
        ),
        ("trainer:\n  seed: 1\n bad: 2\n", "config file bad.yaml, line 3: "),
        ("trainer:\n\tseed: 1\n", "config file bad.yaml, line 2: found character '\\t' that cannot start any token"),
        ("", "config file bad.yaml holds no settings; write keys such as trainer:"),
        ("- a\n- b\n", "config file bad.yaml holds no settings"),
        ("\0\1", "config file bad.yaml is not YAML"),
    ],
    ids=lambda value: value[:30].strip(),
)
def test_a_bad_config_file_is_named_with_what_was_meant(text, expected, capsys):
    assert expected in error_of([*command("fit"), "-c", written(text)], capsys)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            [],
            "no command given; choose fit, validate, test, predict, export, cost, configs, copy, completion, node, "
            "federate, provision, split, clean, statistics, log, submit, runs, stop, verify, card, forget, study, "
            "results, simulate or schema, as in:",
        ),
        (["fitt"], "there is no command 'fitt'; did you mean fit?"),
        *(([f"{name}x"], f"there is no command '{name}x'; did you mean {name}?") for name in COMMANDS),
        (["study"], "--config is missing; see lit-fed study --help"),
        (["study", "-c", "a.yaml", "--job", "2"], "unknown option --job; did you mean --jobs?"),
        (["study", "-c", "a.yaml", "--jobs", "two"], "jobs: expected a whole number, not two"),
        (["simulate"], "--simulate is missing; see lit-fed simulate --help"),
        (["simulate", "-c", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["simulate", "--processes", "many"], "processes: expected a whole number, not many"),
        (["cost"], "model, data and algorithm are missing; name a class with --model or in a file given with --config"),
        (["cost", "--cost", "AttentionShare"], "cost: there is no CostTable named 'AttentionShare'"),
        (["cost", "--cost", "collections.OrderedDict"], "cost: collections.OrderedDict does not derive from CostTable"),
        (
            ["cost", "--cost", "{class_path: lit_fed.methods.FedAvg}"],
            "cost: lit_fed.methods.FedAvg does not derive from CostTable",
        ),
        (
            ["cost", "--cost", "lit_fed.command.commands.cost.CostTable"],
            "cost: lit_fed.command.commands.cost.CostTable is abstract; name a class that derives from it",
        ),
        (["cost", "--cost", "{x: 1}"], "cost: a class is needed; give class_path and init_args"),
        (
            ["cost", "--algorithm", "collections.OrderedDict"],
            "algorithm: collections.OrderedDict does not derive from Algorithm",
        ),
        (["cost", "--model", "Classifer"], "model: there is no LightningModule named 'Classifer'; did you mean"),
        (["train"], "there is no command 'train'; choose fit, validate, test, predict, export, cost, configs, copy"),
        (["-c", str(QUICKSTART), "fit"], "settings come after the command: lit-fed fit --config my.yaml"),
        (["fit", "-c", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["fit", "-c", "configs/method/fedprx.yaml"], "config file configs/method/fedprx.yaml does not exist; did you"),
        (["study", "-c", "uwa_figure.yaml"], "study file uwa_figure.yaml does not exist"),
        (["copy"], "NAME is missing; see lit-fed copy --help"),
        (["configs", "--all"], "unknown option --all; lit-fed configs takes --help"),
        (["fit", "-c", "."], "config file . is a folder"),
        (["fit", "-c"], "-c needs a value"),
        (["fit"], "model, data and algorithm are missing; name a class with --model or in a file given with --config"),
        (["fit", "--data", "Digits"], "model and algorithm are missing; name a class with --model"),
        (["fit", "--model", "Classifier", "--data", "Digits"], "algorithm is missing; name a class with --algorithm"),
        (["test", "--model", "Classifier", "--algorithm", "FedAvg"], "data is missing; name a class with --data"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else "",
)
def test_a_bad_command_says_what_to_do(args, expected, capsys):
    assert error_of(args, capsys).startswith(expected)


class OwnTypes(LightningModule):
    """A user's task with a type of the parser's own."""

    def __init__(self, width: PositiveInt = 1, widths: list[PositiveInt] | None = None) -> None:
        super().__init__()


@pytest.mark.parametrize(("key", "value"), [("width", 0), ("widths", [1, 0])])
def test_the_words_of_the_parser_are_shown_where_its_type_says_more_with_the_file_and_the_line(key, value, capsys):
    path = f"{OwnTypes.__module__}.OwnTypes"
    Path("own.yaml").write_text(yaml.safe_dump({"model": {"class_path": path, "init_args": {key: value}}}))
    told = error_of(["fit", "-c", "own.yaml"], capsys)
    assert re.fullmatch(rf"config file own.yaml, line 4: model.init_args.{key}: .*\b0\b.*", told), told


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"trainer": {"max_rounds": "many"}}, "file, line 3: trainer.max_rounds: expected a whole number, not many"),
        ({"trainer": {"max_round": 4}}, "file, line 3: unknown key trainer.max_round; did you mean trainer.max_rounds"),
        ({"model": "Classifer"}, "file, line 3: model: there is no LightningModule named 'Classifer'; did you mean"),
        (
            {"algorithm": {"class_path": "FedProx", "init_args": {"mu": "x"}}},
            "file, line 3: algorithm.init_args.mu: expected a number, not x",
        ),
        (
            {"trainer": {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"patienc": 3}}]}},
            "file, line 3: unknown key trainer.callbacks.init_args.patienc: EarlyStopping has no such setting",
        ),
    ],
)
def test_no_words_of_the_parser_are_read(settings, expected):
    parser = Parser(exit_on_error=False)
    add_parts(parser)
    told = explain(ArgumentError(None, "?"), parser, settings, "fit", lambda _keys: "file, line 3")
    assert told.startswith(expected)


def test_where_a_value_may_be_one_of_several_types_the_class_that_was_meant_is_judged(capsys):
    logger = "{class_path: CSVLogger, init_args: {save_dirr: x}}"
    assert error_of(command("fit", "--trainer.logger", logger), capsys) == (
        "unknown key trainer.logger.init_args.save_dirr: CSVLogger has no such setting; did you mean save_dir?"
    )


def test_a_class_of_the_users_with_a_name_nearby_is_not_taken_for_a_known_class(capsys):
    class Stopping(Callback):
        """A user's."""

    told = error_of(command("fit", "--trainer.callbacks", "EarlyStopping"), capsys)
    assert "write trainer.callbacks+=EarlyStopping" in told
