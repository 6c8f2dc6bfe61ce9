"""``trainer.kinds`` on the command line: models with settings of their own, and what is wrong with them in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.federated_cli import FederatedCLI
from tests.command.support import command, error_of
from tests.support import ROOT

KINDS = """
trainer:
  kinds:
    wide: {network: mlp, network_args: {hidden: [8]}, clients: [0, 2, 3]}
    adam: {network: logistic, optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}, clients: [1]}
"""
METHOD = ("-c", ROOT / "configs/method/fd_avg.yaml")
SMALL = ("--data.num_clients", "4", "--trainer.participation", "FullParticipation", "--trainer.max_rounds", "1")


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    path = tmp_path / "kinds.yaml"
    path.write_text(KINDS)
    return path


def test_a_kind_has_the_models_settings_but_for_its_own(kinds: Path, tmp_path: Path) -> None:
    folder = ("--trainer.default_root_dir", tmp_path)
    ran = FederatedCLI(command("fit", *METHOD, "-c", kinds, *SMALL, *folder))
    assert {name: type(model.network).__name__ for name, model in ran.model.items()} == {
        "wide": "MLP",
        "adam": "Logistic",
    }
    made = {name: model.configure_optimizers()["optimizer"] for name, model in ran.model.items()}
    # The quickstart's optimizer is SGD with learning rate 0.1.
    assert {name: (type(one).__name__, one.defaults["lr"]) for name, one in made.items()} == {
        "wide": ("SGD", 0.1),
        "adam": ("Adam", 0.01),
    }
    federation = ran.trainer.run.federation
    assert [federation.kinds[client_id] for client_id in range(4)] == ["wide", "adam", "wide", "wide"]
    # What the run's folder keeps is what was written, so that it can be resumed with it.
    kept = yaml.safe_load((ran.trainer.log_dir / "config.yaml").read_text())
    assert kept["trainer"]["kinds"] == yaml.safe_load(KINDS)["trainer"]["kinds"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("{init_args: {lr: 0.5}}", {"lr": 0.5, "momentum": 0.9}),  # what is not set stays
        ("{class_path: torch.optim.SGD, init_args: {lr: 0.5}}", {"lr": 0.5, "momentum": 0.9}),
        ("{lr: 0.5}", {"lr": 0.5, "momentum": 0.9}),
        ("AdamW", {"lr": 0.001, "weight_decay": 0.01}),  # torch's own, and nothing of SGD's
        ("{class_path: torch.optim.RMSprop, init_args: {lr: 0.5}}", {"lr": 0.5, "momentum": 0.0}),
    ],
)
def test_a_kinds_optimizer_goes_over_the_models_or_begins_anew(own: str, expected: Any, tmp_path: Path) -> None:
    words = ["--trainer.kinds", f"{{a: {{}}, b: {{optimizer: {own}}}}}", "--trainer.default_root_dir", tmp_path]
    ran = FederatedCLI(command("fit", *METHOD, "--model.optimizer.momentum", "0.9", *SMALL, *words))
    made = ran.model["b"].configure_optimizers()["optimizer"].defaults
    assert made.items() >= expected.items()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["{}"], "trainer.kinds is empty; name at least one kind of network, or set it to null"),
        (["{a: {netwrk: mlp}}"], "unknown key trainer.kinds.a.netwrk: Classifier has no such setting; did"),
        (["{a: {network: 7}}"], "trainer.kinds.a.network: expected a text or a class, not 7"),
        (["{a: {optimizer: SDG}}"], "trainer.kinds.a.optimizer: there is no Optimizer named 'SDG'"),
        (["{a: {network_args: {hiden: [8]}}}"], "got an unexpected keyword argument 'hiden'"),
        (["{a: {clients: [0, 1]}}"], "trainer.kinds names no network for client 2"),
        (["{a: {clients: [0, 1]}, b: {}}"], "trainer.kinds 'b' names no clients, and other kinds do"),
        (["{a: {clients: all}}"], "trainer.kinds.a.clients is 'all'; it must be a list of clients' names"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_kind_is_one_line(args: list[str], expected: str, tmp_path: Path, capsys: Any) -> None:
    words = command("fit", *METHOD, "--trainer.kinds", *args, "--trainer.default_root_dir", tmp_path)
    assert expected in error_of(words, capsys)


def test_an_option_never_drops_the_rest_of_a_kind(kinds: Path, capsys: Any) -> None:
    said = error_of(command("fit", *METHOD, "-c", kinds, "--trainer.kinds.adam.network", "mlp"), capsys)
    assert said == "--trainer.kinds.adam.network sets a part of a kind; set all of it, as --trainer.kinds.adam '{…}'"


def test_methods_that_average_weights_say_so(kinds: Path, tmp_path: Path, capsys: Any) -> None:
    said = error_of(command("fit", "-c", kinds, *SMALL, "--trainer.default_root_dir", tmp_path), capsys)
    assert said == (
        "algorithm FedAvg combines weights, so all clients need the same network; trainer.kinds has wide, adam"
    )


def test_a_kinds_clients_are_called_by_their_names(tmp_path: Path, capsys: Any) -> None:
    lines = [f"{who},{n % 2},{n}" for who in ("2", "0", "1", "01") for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["who,kind,x", *lines]), encoding="utf-8")
    words = [
        "fit",
        "--model=Classifier",
        "--model.network=logistic",
        "--algorithm=FederatedDistillation",
        "--data=Table",
    ]
    words += ["--algorithm.public_size=10", f"--data.path={tmp_path / 't.csv'}", "--data.target=kind"]
    words += ["--data.client=who", f"--trainer.default_root_dir={tmp_path}", "--trainer.max_rounds=1"]

    def chosen(a: str, b: str) -> str:
        wide = f"network: mlp, network_args: {{hidden: [4]}}, {a}"
        return f"--trainer.kinds={{a: {{{wide}}}, b: {{{b}}}}}"

    # By size and the alphabet the clients are 0, 01, 1, 2: whoever takes names for positions gets the other halves.
    for kinds in (
        chosen("clients: ['2', '01']", "clients: ['0', '1']"),
        chosen("client_positions: [3, 1]", "clients: ['1'], client_positions: [0]"),
    ):
        federation = FederatedCLI([*words, kinds]).trainer.run.federation
        assert federation.data.client_names == ["0", "01", "1", "2"]
        assert [federation.kinds[one] for one in range(4)] == ["b", "a", "b", "a"]
        # What the run's folder keeps says the same.
        run = sorted((tmp_path / "lightning_logs").iterdir())[-1]
        again = FederatedCLI(["test", "-c", str(run / "config.yaml"), "--ckpt_path", str(run)]).trainer.run.federation
        assert [again.kinds[one] for one in range(4)] == ["b", "a", "b", "a"]
    for a, b, message in (
        ("clients: [2, 01]", "clients: [0, 1]", "trainer.kinds.a.clients 2 is a number, and these clients have names"),
        ("clients: ['2', '01']", "clients: ['0', '2']", "trainer.kinds gives client 2 to a and b"),
        ("clients: ['2', '01']", "clients: ['0']", "trainer.kinds names no network for client 1; name one for each"),
        (
            "clients: ['3']",
            "clients: ['0']",
            "trainer.kinds.a.clients: there is no client named '3'; clients are 0, 01,",
        ),
        ("client_positions: [4]", "clients: ['0']", "client_positions: there is no client 4; clients are 0 to 3"),
        ("client_positions: 4", "clients: ['0']", "client_positions is 4; it must be a list of positions from 0"),
    ):
        assert message in error_of([*words, chosen(a, b)], capsys)
