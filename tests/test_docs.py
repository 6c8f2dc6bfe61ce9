"""What the documentation says works: its examples run, its commands parse, its links lead somewhere."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from examples.my_data import Blobs
from examples.my_method import Anchored, MomentumServer
from examples.my_module import LitDigits
from lit_fed import Classifier, ClientModule
from lit_fed.algorithm import Algorithm
from lit_fed.command.cli import main
from lit_fed.data import Digits, FederatedDataModule
from lit_fed.methods import FedAvg
from lit_fed.studies.cells import chosen, lay_out
from lit_fed.studies.run_studies import add_arguments
from lit_fed.studies.metric_check import check_metrics
from lit_fed.studies.study import read_study
from tests.support import ROOT, LeastSquares, Points, assert_same, fit, rows, trainer, weights

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("configs/*.md")])
README = (ROOT / "README.md").read_text()
QUICKSTART = str(ROOT / "configs/quickstart.yaml")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Arguments of every call of cli.py in the README's shell blocks."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    lines = [line.partition("#")[0] for line in text.splitlines() if "cli.py" in line]
    return [shlex.split(line)[shlex.split(line).index("cli.py") + 1 :] for line in lines]


@pytest.fixture
def at_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that looks like the repository's root, without its runs."""
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli.py"])  # Lightning warns of arguments beside main's
    return tmp_path


# --- the README ------------------------------------------------------------------------------------------------------


def test_python_blocks_of_the_readme_run(at_root: Path) -> None:
    main(["fit", "-c", QUICKSTART, "--trainer.max_rounds", "1"])  # the version_0 that load_network reads
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block.replace("max_rounds=10", "max_rounds=2"), "README.md", "exec"), names)
    assert names["network"](torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    parts = (names["LitDigits"](), Digits(num_clients=3), names["MomentumServer"]())
    assert fit(at_root / "own", *parts, max_rounds=1).metrics["server/velocity_norm"] > 0
    anchored = names["Anchored"](network="mlp", num_classes=4, input_shape=(16,), in_channels=16)
    assert "train/anchor" in fit(at_root / "own", anchored, names["Blobs"](num_clients=3), max_rounds=2).metrics


def test_yaml_blocks_of_the_readme_train(at_root: Path) -> None:
    found = [block for block in blocks("yaml") if "rows:" not in block]
    assert found
    for number, block in enumerate(found):
        path = at_root / f"block_{number}.yaml"
        path.write_text(block)
        main(["fit", "-c", QUICKSTART, "-c", str(path), "--trainer.max_rounds", "2"])
        assert len(rows(at_root / f"lightning_logs/version_{number}/metrics.csv")) == 2


def test_studies_of_the_readme_are_studies(at_root: Path) -> None:
    found = [block for block in blocks("yaml") if "rows:" in block]
    assert found
    for number, block in enumerate(found):
        path = at_root / f"study_{number}.yaml"
        path.write_text(block)
        for profile in yaml.safe_load(block)["profiles"]:
            check_metrics(lay_out(read_study(path, profile), at_root))


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_of_the_readme_parse(arguments: list[str], at_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[0] == "study":
        parser = ArgumentParser(exit_on_error=False)
        add_arguments(parser)
        options = parser.parse_args(arguments[1:])
        grids = [lay_out(read_study(path, options.profile), at_root) for path in options.config]
        assert list(chosen(grids, options.only))
        return
    if arguments[0] == "cost":
        main(arguments)
        assert "cost ratio" in capsys.readouterr().out
        return
    if arguments[0] == "simulate":
        main([*arguments, "--rounds", "4", "--seeds", "2", "--processes", "1"])
        assert "written" in capsys.readouterr().out
        return
    if not any(option.endswith(".help") or option == "--print_config" for option in arguments):
        arguments = [*arguments, "--print_config"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0, capsys.readouterr().err


def test_mistakes_of_the_readme_are_told_as_it_says(at_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = re.findall(r"^\$ python cli\.py (.*)\n(lit-fed: error: .*)$", README, re.MULTILINE)
    assert told
    for command, message in told:
        with pytest.raises(SystemExit):
            main(shlex.split(command))
        assert capsys.readouterr().err.strip() == message


def test_checkpoint_commands_of_the_readme_work(at_root: Path) -> None:
    main(["fit", "-c", "configs/quickstart.yaml", "--trainer.max_rounds", "2"])
    told = [command for command in commands() if "--ckpt_path" in command]
    assert {command[0] for command in told} == {"fit", "validate", "test", "predict"}
    for command in told:
        main([*command, "--trainer.max_rounds", "3"])
    assert len((at_root / "predictions.csv").read_text().splitlines()) == 360  # a header and the 359 test digits
    assert (at_root / "client_3.npz").is_file()
    run = at_root / "lightning_logs/version_0"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.csv", "clients.csv", "partition.json", "checkpoints"} <= names
    for column in rows(run / "metrics.csv")[0]:
        stem = re.sub(r"_(mean|std|p10|min)$", "", column)
        assert column in README or stem in README, f"metrics.csv has a column {column} that the README does not explain"


def test_every_class_is_in_the_readme_tables() -> None:
    import lit_fed.data
    import lit_fed.participation
    import lit_fed.protocols

    def leaves(base: type) -> set[str]:
        own = [base, *(c for c in base.__subclasses__() if c.__module__.startswith("lit_fed"))]
        below = set().union(*(leaves(c) for c in own[1:])) if own[1:] else set()
        public = not base.__name__.startswith("_") and not getattr(base, "__abstractmethods__", None)
        return below | ({base.__name__} if public else set())

    named = leaves(lit_fed.participation.Participation) | leaves(lit_fed.protocols.Protocol)
    named |= leaves(lit_fed.data.Partition) | leaves(FederatedDataModule)
    assert {"UniformParticipation", "PersonalTest", "Dirichlet", "ArrayFile"} <= named
    assert not [name for name in sorted(named) if f"`{name}`" not in README]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"`((?:lit_fed|configs|tests|examples|benchmarks|docs)/[\w./-]+)`", text)):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for file, test in set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{page.name} names {file}::{test}"


def test_pictures_are_small() -> None:
    assert all(path.stat().st_size < 150_000 for path in (ROOT / "docs").iterdir())


# --- the examples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my_module", "my_data", "my_method"])
def test_examples_train_from_their_files(name: str, at_root: Path) -> None:
    settings = yaml.safe_load((at_root / f"examples/{name}.yaml").read_text())
    assert any(part.get("class_path", "").startswith(f"examples.{name}.") for part in settings.values())
    main(["fit", "-c", "configs/quickstart.yaml", "-c", f"examples/{name}.yaml", "--trainer.max_rounds", "8"])
    table = rows(at_root / "lightning_logs/version_0/metrics.csv")
    assert float(table[-1]["global/loss"]) < 0.7 * float(table[0]["global/loss"])


def test_the_example_module_trains_under_a_plain_trainer(tmp_path: Path) -> None:
    lightning.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    plain = lightning.Trainer(max_epochs=10, enable_model_summary=False, default_root_dir=tmp_path, **quiet)  # type: ignore[arg-type]
    module, data = LitDigits(lr=3e-3), Digits()
    plain.fit(module, data)
    assert plain.test(module, data, verbose=False)[0]["test/acc"] > 0.9


def test_example_data_in_python(tmp_path: Path) -> None:
    data = Blobs(num_clients=5)
    model: ClientModule = Classifier("mlp", num_classes=data.num_classes, input_shape=data.input_shape, in_channels=16)
    algorithm: Algorithm[Any] = FedAvg()
    made = trainer(tmp_path, max_rounds=5)
    made.fit(model, data, algorithm)
    assert made.test(model, data, algorithm)["global/acc"] > 0.8
