"""The command line: what works, and how everything that cannot work says so in one line."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lit_fed.command.cli import main
from lit_fed.command.federated_cli import Reading, resolve
from lit_fed.command.table import COMMANDS
from tests.command.support import LR, QUICKSTART, command, error_of, settings_of
from tests.support import ROOT, rows

# ---------------------------------------------------------------------- settings that cannot work


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([LR, "-0.1"], "Invalid learning rate: -0.1"),
        (["--data.init_args.num_clients", "0"], "data.num_clients is 0"),
        (["--trainer.participation.init_args.count", "21"], "participation.count is 21; it must be at least 1"),
        (["--trainer.participation.init_args.fraction", "0.5"], "count is 5 and fraction is 0.5; give exactly one"),
        (["--data.init_args.num_clients", "1439"], "1438 training samples cannot be shared among 1439 clients"),
        (["--data.init_args.partition.init_args.alpha", "-1"], "data.partition.alpha is -1.0"),
        (["--data.init_args.val_fraction", "1.5"], "data.val_fraction is 1.5"),
        (["--trainer.local_epochs", "0"], "trainer.local_epochs is 0"),
        (["--model.init_args.num_classes", "5"], "model.num_classes is 5, but the data have 10 classes"),
        (["--model.init_args.network", "smal_cnn"], "network 'smal_cnn' is neither in lit_fed nor in timm; did"),
        (["--model.init_args.network_args", "{widht: 3}"], "'widht'; its settings are"),
        (
            ["--model.network", "mlp", "--model.network_args", "{hidden: 17}"],
            "network 'mlp': hidden is 17; it must be a list of whole numbers",
        ),
        (["--algorithm", "FedProx", "--algorithm.init_args.mu", "-1"], "algorithm.mu is -1.0"),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.patience", "0"],
            "trainer.callbacks.patience is 0",
        ),
        (["--trainer.max_rounds", "0"], "trainer.max_rounds is 0"),
        (["--trainer.seed", "-1"], "trainer.seed is -1; it must be at least 0"),
        (["--trainer.strategy", "fsdp"], "trainer.strategy is 'fsdp'; it must be 'auto', 'clients' or 'ddp'"),
        (["--trainer.accelerator", "gpuu"], "gpuu"),
        (["--trainer.protocols+=UnseenTest"], "UnseenTest needs unseen clients; set participation.unseen_fraction"),
        (
            ["--trainer.evaluate_on", "val", "--data.init_args.val_fraction", "0"],
            "there is no validation data; set data.init_args.val_fraction above 0",
        ),
        (["--data", "ArrayFile"], "ArrayFile needs either data.path, the .npz file, or data.name"),
        (["--data", "ArrayFile", "--data.init_args.path", "none.npz"], "none.npz does not exist; set data.path"),
        (["--data", "FashionMNIST"], "FashionMNIST reads train-images-idx3-ubyte"),
        (["--data", "ClientFolders", "--data.init_args.root", "none"], "none is not a folder; set data.root"),
        (["--trainer.default_root_dir", str(QUICKSTART)], "the run's folder cannot be created under"),
        (["--ckpt_path", "no.ckpt"], "there is no checkpoint at no.ckpt"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_setting_that_cannot_work_is_named(args, expected, capsys):
    assert expected in error_of(command("fit", *args), capsys)
    assert not Path("lightning_logs").exists(), "a run that never began left a folder"


@pytest.mark.parametrize(
    ("y_train", "args", "expected"),
    [
        (np.arange(40) % 3 - 1, [], "training labels of set.npz: label -1 of sample 0 is not in 0 … 1"),
        (np.arange(40) % 3, ["--data.init_args.num_classes", "2"], "label 2 of sample 2 is not in 0 … 1"),
        (np.arange(5) % 3, [], "5 training samples cannot be shared among 20 clients"),
        (np.arange(40) / 3, [], "test targets of set.npz are int64; give floating-point numbers"),
    ],
)
def test_an_array_file_with_bad_labels_is_named(y_train, args, expected, capsys):
    x = np.zeros((len(y_train), 8, 8), np.uint8)
    np.savez("set.npz", x_train=x, y_train=y_train, x_test=x[:4], y_test=np.zeros(4, np.int64))
    data = ["--data", "ArrayFile", "--data.init_args.path", "set.npz", *args]
    assert expected in error_of(command("fit", *data), capsys)


def test_a_damaged_array_file_is_named(capsys):
    Path("set.npz").write_text("hello")
    data = ["--data", "ArrayFile", "--data.init_args.path", "set.npz"]
    assert error_of(command("fit", *data), capsys).startswith("set.npz cannot be read (File is not a zip file); save")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["test"], "this trainer has not trained a model; give --ckpt_path last, best, or a checkpoint file"),
        (["test", "--ckpt_path", "last"], "no run under lightning_logs has a last.ckpt"),
        (["test", "--ckpt_path", "."], "there is no checkpoint at checkpoints/last.ckpt"),
        (["validate", "--data.init_args.val_fraction", "0"], "there is no validation data"),
    ],
)
def test_evaluation_without_a_model_says_what_to_give(args, expected, capsys):
    assert error_of(command(*args), capsys).startswith(expected)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--client", "20"], "there is no client 20; clients are 0 to 19"),
        (["--client", "-1"], "there is no client -1; clients are 0 to 19"),
        (["--client", "bob"], "there is no client named 'bob'"),
        (["--output", "p.txt"], "--output is 'p.txt'; it must be a .csv, .npz or .json file"),
        (["--output", str(QUICKSTART / "p.csv")], "quickstart.yaml"),
    ],
)
def test_predictions_that_cannot_be_made_say_why(args, expected, run_of_two_rounds, capsys):
    assert expected in error_of(command("predict", "--ckpt_path", run_of_two_rounds, *args), capsys)


# ---------------------------------------------------------------------- checkpoints


class _Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("pwned",))


def _write(name: str, good: Path, path: Path) -> None:
    content = good.read_bytes()
    match name:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("hello\n")
        case "random bytes":
            path.write_bytes(np.random.default_rng(0).bytes(5000))
        case "flipped bytes":
            middle = len(content) // 10
            path.write_bytes(content[:middle] + bytes(b ^ 255 for b in content[middle:-middle]) + content[-middle:])
        case "pickle":
            path.write_bytes(pickle.dumps(_Evil(), protocol=2))
        case "pickle in a torch file":
            torch.save({"weights": _Evil()}, path)
        case "another program's":
            torch.save({"state_dict": {}, "epoch": 3, "pytorch-lightning_version": "2.6"}, path)
        case "a list":
            torch.save([1, 2], path)


DAMAGES = ["truncated", "empty", "text", "random bytes", "flipped bytes", "pickle", "pickle in a torch file"]


@pytest.mark.parametrize(
    ("subcommand", "name"),
    [*(("fit", name) for name in [*DAMAGES, "another program's", "a list"]), ("test", "truncated"), ("test", "pickle")],
)
def test_a_corrupt_or_foreign_checkpoint_is_named_and_never_executed(name, subcommand, run_of_two_rounds, capsys):
    _write(name, run_of_two_rounds / "checkpoints" / "last.ckpt", Path("bad.ckpt"))
    assert error_of(command(subcommand, "--ckpt_path", "bad.ckpt"), capsys).startswith("bad.ckpt ")
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model.init_args.network", "mlp"], "and does not fit FedAvg on Classifier: model has 'network."),
        (["--trainer.seed", "7"], "comes from a run with seed 0; set --trainer.seed 0 to use it"),
    ],
)
@pytest.mark.parametrize("subcommand", ["fit", "test"])
def test_a_checkpoint_of_another_run_is_refused(args, expected, subcommand, run_of_two_rounds, capsys):
    before = (run_of_two_rounds / "checkpoints" / "last.ckpt").read_bytes()
    assert expected in error_of(command(subcommand, "--ckpt_path", run_of_two_rounds, *args), capsys)
    assert (run_of_two_rounds / "checkpoints" / "last.ckpt").read_bytes() == before


def test_the_table_and_predictions_name_the_checkpoint_and_who_saved_it(run_of_two_rounds, capsys):
    other = command("fit", "--trainer.max_rounds", "1", LR, "0.2")
    main(other)
    main(other)
    shutil.copytree(run_of_two_rounds, "elsewhere")
    for ckpt, file in (
        ("best", "lightning_logs/version_1/checkpoints/best.ckpt"),  # of the newest run, not the best of all
        ("elsewhere", "elsewhere/checkpoints/last.ckpt"),
    ):
        for subcommand in ("test", "validate", "predict"):
            capsys.readouterr()
            main(command(subcommand, "--ckpt_path", ckpt, *["--overwrite"] * (subcommand == "predict")))
            lines = capsys.readouterr().out.splitlines()
            assert f"model      {file}, saved by FedAvg on Classifier" in lines


def test_what_clients_keep_is_not_looked_for_outside_their_run(capsys):
    fedper = ("-c", ROOT / "configs/method/fedper.yaml", "--trainer.max_rounds", "1")
    main(command("fit", *fedper))
    shutil.copy("lightning_logs/version_0/checkpoints/last.ckpt", "moved.ckpt")
    line = error_of(command("predict", *fedper, "--ckpt_path", "moved.ckpt", "--client", "3"), capsys)
    assert line == (
        "the checkpoint lies outside of its run's folder, which holds the clients' states; use it where the run left it"
    )


# ---------------------------------------------------------------------- failures during a run


def test_a_client_whose_loss_turns_nan_stops_the_run_and_nothing_of_the_round_is_kept(capsys):
    main(command("fit", "--trainer.max_rounds", "2"))
    last = Path("lightning_logs/version_0/checkpoints/last.ckpt")
    before = last.read_bytes()
    bad = command("fit", "--trainer.max_rounds", "4", "--ckpt_path", "last", LR, "1e30")
    message = error_of(bad, capsys, status=1)
    assert re.fullmatch(r"client \d+ failed in round 2: train/loss is not finite; try a smaller learning rate", message)
    assert last.read_bytes() == before
    assert [row["round"] for row in rows(last.parents[1] / "metrics.csv")] == ["0", "1"]
    assert {row["round"] for row in rows(last.parents[1] / "clients.csv")} == {"0", "1"}
    main(command("fit", "--trainer.max_rounds", "3", "--ckpt_path", "last"))
    assert torch.load(last, weights_only=True)["round_idx"] == 3


@pytest.mark.long
def test_a_full_disk_stops_the_run_and_the_previous_checkpoint_survives():
    main(command("fit", "--trainer.max_rounds", "2"))
    last = Path("lightning_logs/version_0/checkpoints/last.ckpt").resolve()
    before = last.read_bytes()
    # The kernel refuses every byte beyond the limit, as a full disk does; the other files of the run are smaller.
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) // 2},) * 2);"
        "from lit_fed.command.cli import main; main(sys.argv[1:])"
    )
    args = command("fit", "--trainer.max_rounds", "3", "--ckpt_path", "last")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, "-c", program, *args], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2, run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert "last.ckpt: [Errno 27] File too large; the previous last.ckpt is intact" in run.stderr
    assert last.read_bytes() == before
    assert not list(last.parent.glob(".last.ckpt*")), "half a file was left behind"
    main(command("fit", "--trainer.max_rounds", "3", "--ckpt_path", "last"))
    assert torch.load(last, weights_only=True)["round_idx"] == 3
    assert [row["round"] for row in rows(last.parents[1] / "metrics.csv")] == ["0", "1", "2"]


# ---------------------------------------------------------------------- what works


def output_of(args: list[str], capsys: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(args)
    captured = capsys.readouterr()
    assert stop.value.code == 0
    assert captured.err == ""
    return str(captured.out)


def test_help_names_commands_and_settings(capsys):
    general = " ".join(output_of(["--help"], capsys).split())
    assert list(COMMANDS) == [
        "fit",
        "validate",
        "test",
        "predict",
        "export",
        "cost",
        "configs",
        "copy",
        "completion",
        "node",
        "federate",
        "provision",
        "split",
        "clean",
        "statistics",
        "log",
        "submit",
        "runs",
        "stop",
        "verify",
        "card",
        "forget",
        "study",
        "results",
        "simulate",
        "schema",
    ]
    for name, line in COMMANDS.items():
        assert f" {name} {line.help}" in general
    fit = output_of(["fit", "--help"], capsys)
    assert "Total number of rounds" in fit
    assert "``" not in fit
    assert len(fit.splitlines()) < 450  # the classes of torch would be thousands
    model = output_of(["fit", "--algorithm.help", "FedProx"], capsys)
    assert "--algorithm.mu MU" in model
    assert "0x" not in output_of(["node", "--help"], capsys), "the address of a function"
    assert len(model.splitlines()) < 100, "it lists all of torch"


def test_the_help_that_needs_no_import_is_that_of_the_parser_of_a_run(capsys):
    assert output_of(["--help"], capsys) == Reading(command("fit")).parser.format_help()


def test_parts_come_in_any_order_before_and_after_the_class_they_are_of(capsys):
    files = [f"{ROOT}/configs/{name}.yaml" for name in ("network/mlp", "data/digits_iid", "method/scaffold")]
    parts = [["-c", file] for file in files] + [["--model", "Classifier"]]
    printed = set()
    for order in permutations(parts):
        printed.add(output_of(["fit", *(word for part in order for word in part), "--print_config"], capsys))
    (config,) = map(yaml.safe_load, printed)
    assert config["model"]["init_args"]["network"] == "mlp"
    assert config["algorithm"]["class_path"].endswith("Scaffold")


STRANGER = """
import torch
from lightning import LightningModule

class Net(LightningModule):
    def __init__(self, num_outputs: int | None = None, input_shape: tuple[int, ...] | None = None):
        super().__init__()
        assert (num_outputs, input_shape) == (10, (1, 8, 8))
        self.layer = torch.nn.Linear(64, num_outputs)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""


def test_any_module_of_the_working_directory_is_a_model_that_is_told_about_the_data(monkeypatch, capsys):
    Path("stranger_of_test_cli.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    given = ["-c", str(ROOT / "configs/data/digits_iid.yaml"), "--model", "stranger_of_test_cli.Net"]
    method = ["-c", str(ROOT / "configs/method/scaffold.yaml"), "--trainer.max_rounds=1", "--trainer.logger=false"]
    main(["fit", *given, *method, "--trainer.enable_progress_bar=false"])
    row = rows(Path("lightning_logs/version_0/metrics.csv"))[0]
    assert float(row["global/loss"]) > 0
    assert (64 * 10 + 10) * 4 * 2 * float(row["participation/count"]) == float(row["comm/uplink_bytes"])
    main(["cost", *given, *method])
    assert "cost ratio 2.0000" in capsys.readouterr().out


def test_version(capsys):
    from lit_fed import __version__

    assert output_of(["--version"], capsys).split()[-1] == __version__


@pytest.mark.parametrize(
    "words",
    [(), ("-c", "method/fedper.yaml", "--trainer.max_rounds", "3"), ("--data.partition", "Dirichlet", LR, "1")],
)
def test_a_commands_own_parser_reads_what_the_parser_of_all_commands_reads(words, capsys):
    """``--print_config`` is of the parser of all commands."""
    args = command("fit", *words)
    assert {"ckpt_path": None, **yaml.safe_load(resolve(args))} == settings_of(args, capsys)


def test_the_printed_configuration_can_be_fed_back(capsys):
    first = output_of(command("fit", "--algorithm", "FedProx", "--print_config"), capsys)
    Path("all.yaml").write_text(first)
    assert output_of(["fit", "-c", "all.yaml", "--print_config"], capsys) == first
    assert yaml.safe_load(first)["trainer"]["local_epochs"] == 5
    main(["fit", "-c", "all.yaml", "--trainer.max_rounds", "1"])
    run = Path("lightning_logs/version_0")
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["model"]["init_args"]["num_classes"] == 10, "what was taken from the data is written out"
    capsys.readouterr()
    main(["test", "-c", str(run / "config.yaml"), "--ckpt_path", "last"])
    assert "global/acc" in capsys.readouterr().out


def test_every_command_runs_and_writes_nothing_to_stderr(run_of_two_rounds, capsys):
    ckpt = ("--ckpt_path", run_of_two_rounds / "checkpoints" / "last.ckpt")
    main(command("test", *ckpt))
    main(command("validate", *ckpt))
    main(command("predict", *ckpt, "--client", "3", "--output", "client.csv"))
    main(command("predict", *ckpt, "--output", "all.npz"))
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "test data, after 2 rounds" in captured.out
    predicted = rows(Path("client.csv"))
    assert {"index", "prediction", "probability_0", "probability_9"} <= predicted[0].keys()
    with np.load("all.npz") as archive:
        assert archive["probability"].shape == (359, 10)  # a fifth of 1,797 digits, rounded per class
