"""What the documentation says works: its examples run, its commands parse, its links lead somewhere."""

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from inspect import getsource, signature
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI

from examples.my_data import Blobs
from examples.my_lora import LoRALinear
from examples.my_module import LitDigits
from examples.notebooks import write_notebooks
from lit_fed import Algorithm, Classifier, FederatedTrainer, Regularizer
from lit_fed.command.cli import main
from lit_fed.data import Digits, FederatedDataModule, Samples
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.studies.file.study import read_study
from lit_fed.studies.running.cells import chosen, lay_out
from lit_fed.studies.running.parts import check_metrics
from tests.methods.support import Rota
from tests.support import ROOT, assert_same, fit, kept, rows, saved_weights, trainer, weights

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("configs/**/*.md"), *ROOT.glob("docs/**/*.md")])
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
GUIDE = "\n".join(TEXT[page] for page in GUIDES)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
QUICK = ("--trainer.logger", "false", "--trainer.enable_progress_bar", "false")


def name(page: Any) -> str:
    return page.relative_to(ROOT).as_posix() if isinstance(page, Path) else str(page)


def blocks(page: Path, language: str) -> list[str]:
    """A page's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT[page], re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[list[str]]:
    """Arguments of every call of the program in a page's shell blocks."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        starts = [
            place
            for place, word in enumerate(words)
            if word == "lit-fed" or words[max(place - 1, 0) : place + 1] == ["-m", "lit_fed"]
        ]
        found += [words[place + 1 :] for place in starts[:1]]
    return found


COMMANDS = list(dict.fromkeys(tuple(command) for page in PAGES for command in commands_of(page)))


@pytest.fixture
def at_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that looks like the repository's root, with the README's net.py and without its runs."""
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for block in blocks(ROOT / "README.md", "python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
    for _, block in yaml_blocks(studies=True):
        if named := re.match(r"# (\w+\.yaml)\n", block):
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-fed"])  # Lightning warns of arguments beside main's
    return tmp_path


@pytest.fixture
def with_a_run(at_root: Path) -> Path:
    """The same, with a finished run of one round of the quickstart."""
    main(["fit", "-c", QUICKSTART, "--trainer.max_rounds", "1", "--trainer.local_epochs", "1", *QUICK])
    return at_root


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")], ids=name)
def test_python_blocks_run(page: Path, with_a_run: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block.replace("max_rounds=10, local_epochs=5", "max_rounds=2"), page.name, "exec"), names)
    if page == ROOT / "docs/handover.md":
        assert names["network"](torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    if page == ROOT / "docs/own_data.md":
        table = fit(with_a_run / "own", Classifier("logistic", num_classes=4, input_shape=(16,)), names["Blobs"]())
        assert "global/acc" in table.metrics
    made = [value for value in names.values() if isinstance(value, type) and value.__module__ == "builtins"]
    for one in made:  # a method, a regularizer, a data set: the classes of the page take part in a run
        if issubclass(one, Algorithm):
            term = {"Anchored": "train/anchor", "Near": "train/near"}.get(one.__name__, "train/loss")
            module = Classifier("logistic", num_classes=5, input_shape=(2,)) if "logits" in one.needs else None
            assert term in fit(with_a_run / "own", module, algorithm=one()).metrics
        elif issubclass(one, Regularizer):
            assert f"train/{one.name}" in fit(with_a_run / "own", algorithm=FedAvg(regularizer=one())).metrics
        elif issubclass(one, Digits):
            fit(with_a_run / "own", LitDigits(), one(num_clients=3), max_rounds=1)


def bare(source: str) -> str:
    """A class without docstrings, comments and annotations."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(found):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in (*node.args.args, node.args.vararg, node.args.kwarg):
                if argument is not None:
                    argument.annotation = None
    return ast.unparse(found)


def test_the_method_of_the_docs_is_the_example() -> None:
    (block,) = [block for block in blocks(ROOT / "docs/own_method.md", "python") if "class Anchored" in block]
    shown = bare(block)
    assert shown == bare((ROOT / "examples/my_method.py").read_text(encoding="utf-8"))
    assert len([line for line in shown.splitlines() if line.strip()]) <= 20


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """The classes of the page of one's own method."""
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs/own_method.md", "python"):
        exec(compile(block, "own_method.md", "exec"), names)
    return names


def global_weight(made: Any) -> list[float]:
    found: list[float] = weights(made)["network.weight"].flatten().tolist()
    return found


def test_fedcm_of_own_method_is_the_papers_by_hand(tmp_path: Path, own: dict[str, Any]) -> None:
    # Points: client 0 has the gradient (w₁ − 2, 0), client 1 (0, w₂ − 4). η = ½, K = 2, so ηK = 1; α = ½.
    # Round 0, Δ = 0, v = ½g:
    #   client 0: w₁ = 0 → ½·½·2 = 0.5 → 0.5 + ½·½·1.5 = 0.875;  client 1: w₂ = 0 → 1 → 1.75
    #   w = (0.4375, 0.875), Δ = mean of (w_g − w_i)/1 = (−0.4375, −0.875)
    # Round 1, v = ½g + ½Δ:
    #   client 0: v = ½(−1.5625, 0) + ½Δ = (−1, −0.4375) → (0.9375, 1.09375)
    #             v = ½(−1.0625, 0) + ½Δ = (−0.75, −0.4375) → (1.3125, 1.3125)
    #   client 1: v = ½(0, −3.125) + ½Δ = (−0.21875, −2) → (0.546875, 1.875)
    #             v = ½(0, −2.125) + ½Δ = (−0.21875, −1.5) → (0.65625, 2.625)
    #   w = (0.984375, 1.96875), Δ = (0.4375, 0.875) − w = (−0.546875, −1.09375)
    made = fit(tmp_path, algorithm=own["FedCM"](alpha=0.5, weighting="uniform"), max_rounds=2, local_epochs=2)
    assert global_weight(made) == [0.984375, 1.96875]
    assert made.run.federation.server["delta"]["network.weight"].tolist() == [[-0.546875, -1.09375]]


def test_fedcm_of_own_method_is_fedavg_where_alpha_is_1(tmp_path: Path, own: dict[str, Any]) -> None:
    made = [fit(tmp_path, algorithm=one, max_rounds=3, local_epochs=2) for one in (own["FedCM"](alpha=1.0), FedAvg())]
    assert global_weight(made[0]) == global_weight(made[1])


def test_controlled_of_own_method_is_scaffold(tmp_path: Path, own: dict[str, Any]) -> None:
    methods = own["Controlled"](weighting="uniform"), Scaffold(option=2)
    made = [fit(tmp_path, algorithm=one, max_rounds=3, local_epochs=2) for one in methods]
    assert global_weight(made[0]) == global_weight(made[1])
    assert made[0].metrics["comm/total_bytes"] == made[1].metrics["comm/total_bytes"]


def test_returning_of_own_method_by_hand(tmp_path: Path, own: dict[str, Any]) -> None:
    # Client 0 in round 0, 1 round away: (0, 0) → (1, 0), where its gradient is (1 − 2) + 1·(1 − 0) = 0.
    # Client 1 in round 1, 2 rounds away: (1, 0) → (1, 2), and from there along −(2 − 4) − ½·2 = 1 by ½.
    settings: dict[str, Any] = {"max_rounds": 2, "local_epochs": 2, "participation": Rota()}
    made = fit(tmp_path, algorithm=own["Returning"](mu=1.0), **settings)
    assert global_weight(made) == [1.0, 2.5]


def test_noisy_median_of_own_method_draws_the_same_in_a_resumed_run(tmp_path: Path, own: dict[str, Any]) -> None:
    # One step from 0 takes client 0 to (1, 0) and client 1 to (0, 2); torch's median of two is the smaller: (0, 0).
    made = fit(tmp_path / "none", algorithm=own["NoisyMedian"](std=0.0), max_rounds=1)
    assert global_weight(made) == [0.0, 0.0]
    whole = fit(tmp_path / "whole", algorithm=own["NoisyMedian"](), max_rounds=3)
    fit(tmp_path / "parts", algorithm=own["NoisyMedian"](), max_rounds=1)
    parts = fit(tmp_path / "parts", algorithm=own["NoisyMedian"](), max_rounds=3, ckpt_path="last")
    assert global_weight(whole) == global_weight(parts) != [0.0, 0.0]


def test_readings_of_own_method_are_those_of_the_sent_model(tmp_path: Path, own: dict[str, Any]) -> None:
    # Points: client 0 has (1, 0) of class 2, client 1 thrice (0, 1) of class 4. At learning rate 0 nothing moves.
    logs: dict[str, str] = {}
    for method in ("MeanLogits", "LossAfter"):
        module = Classifier(
            "logistic", num_classes=5, input_shape=(2,), optimizer=lambda params: torch.optim.SGD(params, lr=0.0)
        )
        logs |= rows(fit(tmp_path / method, module, algorithm=own[method](), max_rounds=1).log_dir / "metrics.csv")[-1]
    with torch.no_grad():
        z = module.network(torch.eye(2))
    means = torch.zeros(5, 5)
    means[2], means[4] = z[0], z[1]
    assert float(logs["server/margin"]) == pytest.approx(float(means.diag().mean() - means.mean()), rel=1e-6)
    losses = torch.nn.functional.cross_entropy(z, torch.tensor([2, 4]), reduction="none")
    assert float(logs["server/loss_after"]) == pytest.approx(float((losses[0] + 3 * losses[1]) / 4), rel=1e-6)


def test_steps_of_own_method_round_movements_and_keep_the_rest(tmp_path: Path, own: dict[str, Any]) -> None:
    """In steps of a quarter. Round 0 moves (1, 0) and (0, 2), whole steps: w = (¼, 1½), as FedAvg's.

    Round 1: client 0 moves ½ (2 - ¼) = 7/8, 3½ steps, and sends 4; client 1 moves ½ (4 - 1½) = 5/4, 5 steps.
             w = (¼ + 1 / 4, 1½ + 3 · 5/4 / 4) = (½, 2 7/16)
    """
    made = fit(tmp_path, uplink_codec=own["Steps"](step=0.25))
    assert global_weight(made) == [0.5, 2.4375]
    assert kept(made, 0)["codec/error/network.weight"].tolist() == [[-0.125, 0.0]]
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/uplink_uncoded_bytes"]) == (2 * 2, 2 * 8)


def test_round_robin_of_own_method_deals_every_sample_once(own: dict[str, Any]) -> None:
    csr = own["RoundRobin"]()(Samples(7), 3, 0)
    assert csr.sizes.tolist() == [3, 2, 2]
    assert sorted(csr.indices.tolist()) == list(range(7))


def same_numbers(said: str, shown: str) -> bool:
    """Whether a text is as the page has it; accuracies may differ by what another processor rounds."""
    number = r"0\.\d\d"
    alike = re.sub(number, "", said) == re.sub(number, "", shown)
    pairs = zip(re.findall(number, said), re.findall(number, shown), strict=alike)
    return alike and all(abs(float(one) - float(other)) < 0.03 for one, other in pairs)


def test_adapters_send_what_their_page_says(with_a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs/adapters.md"
    layer, runs = blocks(page, "python")
    assert bare(layer) == bare(getsource(LoRALinear))
    said = said_by(layer + runs, capsys)
    assert same_numbers(said, blocks(page, "text")[0])
    # A and B of two layers with rank 4; the whole network: 64·64 + 64 + 64·10 + 10.
    assert 4 * 4 * (64 + 64 + 64 + 10) == 3232
    assert 4 * (64 * 64 + 64 + 64 * 10 + 10) == 19240


def test_adapters_of_peft_send_what_their_page_says(with_a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    page = ROOT / "docs/adapters.md"
    ours = [one for one in blocks(page, "py") if "push_to_hub" not in one]
    said = said_by("\n".join([*blocks(page, "python"), *ours]), capsys)
    assert said.endswith(blocks(page, "text")[1])


def said_by(source: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The lines on bytes that a program prints."""
    capsys.readouterr()
    exec(compile(source, "page", "exec"), {})
    return "".join(line for line in capsys.readouterr().out.splitlines(keepends=True) if "bytes up a client" in line)


def as_modules(page: Path, folder: Path, language: str = "python") -> None:
    """Write a page's blocks to the files that their first lines name."""
    for block in blocks(page, language):
        if named := re.match(r"# (\w+\.(?:py|yaml))\n", block):
            (folder / named[1]).write_text(block, encoding="utf-8")


def test_a_command_line_of_ones_own_is_as_its_page_says(at_root: Path) -> None:
    page = ROOT / "docs/own_cli.md"
    as_modules(page, at_root)
    as_modules(page, at_root, "yaml")
    short = ["--trainer.max_rounds", "1", *QUICK]
    runpy.run_path("federate_digits.py")["run"]([*short, "--trainer.local_epochs", "1"])
    config = yaml.safe_load((at_root / "lightning_logs/version_0/config.yaml").read_text(encoding="utf-8"))
    assert (config["algorithm"]["class_path"], config["trainer"]["max_rounds"]) == ("lit_fed.methods.FedProx", 1)
    assert len(rows(at_root / "lightning_logs/version_0/metrics.csv")) == 1
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("federate_digits.py")["run"](["--trainer.max_round", "1"])
    assert ended.value.code == 2
    made = runpy.run_path("own_cli.py")["train"](["-c", "own_cli.yaml", "--width", "32", *short])
    assert made.run.next_round == 1
    shapes = sorted(tuple(tensor.shape) for tensor in weights(made).values())
    assert shapes == [(10,), (10, 32), (32,), (32, 64)]  # 64 pixels, the width, ten digits
    for option in re.findall(r"`(--(?:trainer|model)\..+?)`", TEXT[page]):  # those of the table
        with pytest.raises(SystemExit) as ended:
            main(["fit", "-c", QUICKSTART, *shlex.split(option), "--print_config"])
        assert ended.value.code == 0, option
    with pytest.raises(MisconfigurationException, match="Cannot add arguments from"):  # as the page says
        LightningCLI(Classifier, Digits, trainer_class=FederatedTrainer, args=["fit"])  # type: ignore[arg-type]


def test_parts_from_the_command_line_are_those_of_their_page(at_root: Path) -> None:
    page = ROOT / "docs/own_parts.md"
    classes, runs = blocks(page, "python")[:-1], blocks(page, "python")[-1]
    assert "trainer.fit(" in runs
    (at_root / "parts.py").write_text("\n".join(classes), encoding="utf-8")
    (command,) = blocks(page, "sh")
    words = shlex.split(command.replace("\\\n", ""))
    main([*words[1:], "--trainer.max_rounds", "2", "--trainer.local_epochs", "1", *QUICK])
    config = yaml.safe_load((at_root / "lightning_logs/version_0/config.yaml").read_text(encoding="utf-8"))
    of_parts = [config["trainer"]["participation"], config["trainer"]["aggregation"], *config["trainer"]["callbacks"]]
    names = [one["class_path"] for one in [*of_parts, config["algorithm"]]]
    assert names == ["parts.InTurn", "parts.MiddleHalf", "parts.ByteBudget", "parts.BySqrt"]
    taken = {
        row["client_id"] for row in rows(at_root / "lightning_logs/version_0/clients.csv") if row["stage"] == "train"
    }
    assert taken == {str(client) for client in range(16)}  # eight a round, in turn


def test_rising_of_own_method_counts_local_steps(tmp_path: Path, own: dict[str, Any]) -> None:
    # Points: client 0 has the gradient (w₁ − 2, 0), client 1 (0, w₂ − 4). η = ½, K = 2: step 1 takes half of it.
    #   client 0: w₁ = 0 → ½·½·2 = 0.5 → 0.5 + ½·1.5 = 1.25;  client 1: w₂ = 0 → ½·½·4 = 1 → 1 + ½·3 = 2.5
    made = fit(tmp_path, algorithm=own["Rising"](weighting="uniform"), max_rounds=1, local_epochs=2)
    assert global_weight(made) == [0.625, 1.25]


def yaml_blocks(studies: bool) -> list[tuple[Path, str]]:
    found = [(page, block) for page in GUIDES for block in blocks(page, "yaml")]
    ours = ROOT / "docs/hospitals.md"  # its files and its study follow one another, see test_across_page.py
    found = [(page, block) for page, block in found if not block.startswith("# federation.yaml\n") and page != ours]
    return [(page, block) for page, block in found if bool(re.search(r"^(rows|grid):", block, re.MULTILINE)) == studies]


@pytest.mark.parametrize(("page", "block"), yaml_blocks(studies=False), ids=lambda part: name(part)[:40])
def test_yaml_blocks_train(page: Path, block: str, at_root: Path) -> None:
    if "privacy" in yaml.safe_load(block).get("trainer", {}):
        pytest.importorskip("dp_accounting")
    (at_root / "block.yaml").write_text(block, encoding="utf-8")
    short = ["--trainer.max_rounds", "2", "--trainer.local_epochs", "1", *QUICK]
    main(["fit", "-c", QUICKSTART, "-c", "block.yaml", *short])
    assert len(rows(at_root / "lightning_logs/version_0/metrics.csv")) == 2


def test_studies_are_studies(at_root: Path) -> None:
    found = yaml_blocks(studies=True)
    assert found
    for number, (_, block) in enumerate(found):
        path = at_root / f"study_{number}.yaml"
        path.write_text(block, encoding="utf-8")
        for profile in yaml.safe_load(block).get("profiles", [None]):
            check_metrics(lay_out(read_study(path, profile), at_root))


# --- commands --------------------------------------------------------------------------------------------------------


def test_commands_are_found() -> None:
    assert {command[0] for command in COMMANDS} == {
        "fit",
        "validate",
        "test",
        "predict",
        "study",
        "results",
        "cost",
        "simulate",
        "statistics",
        "node",
        "federate",
        "configs",
        "copy",
        "schema",
        "completion",
        "export",
        "verify",
        "card",
        "forget",
    }


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_parse(command: tuple[str, ...], at_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command[0] == "study":
        files = [word for word in command if word.endswith(".yaml")]
        profile = command[command.index("--profile") + 1] if "--profile" in command else None
        only = command[command.index("--only") + 1 :] if "--only" in command else []
        assert list(chosen([lay_out(read_study(path, profile), at_root) for path in files], list(only)))
        return
    if command[0] == "cost":
        main([*command])
        assert re.search(r"cost ratio|MB", capsys.readouterr().out)
        return
    if command[0] in ("configs", "copy", "schema", "completion"):
        main([*command])
        assert ("FedProx" if command[0] == "schema" else "fedprox.yaml") in capsys.readouterr().out
        return
    if command[0] == "export":
        main(["fit", "-c", QUICKSTART, "--trainer.max_rounds", "1", "--trainer.local_epochs", "1", *QUICK])
        main([*command])
        written = at_root / (command[command.index("--output") + 1] if "--output" in command else "exported")
        assert {"model.pt2", "model.safetensors", "model.json", "MODEL_CARD.md"} <= {p.name for p in written.iterdir()}
        return
    if (
        told := {"verify": "whole", "card": "card.md", "forget": "run again   rounds 0 to 0"}.get(command[0])
    ) is not None:
        short = ["--trainer.max_rounds", "1", "--trainer.local_epochs", "1", "--trainer.record", "true", *QUICK]
        main(["fit", "-c", QUICKSTART, *short])
        main([*command])
        assert told in capsys.readouterr().out
        return
    if command[0] == "simulate":
        length = "steps" if any("/uwa/" in word for word in command) else "rounds"
        least = "20" if any("/raf/" in word for word in command) else "4"  # the fewest that it takes
        main([*command, f"--simulate.{length}", least, "--simulate.seeds", "2", "--processes", "1"])
        assert "written" in capsys.readouterr().out
        return
    if command[0] == "results":
        with pytest.raises(SystemExit):
            main([*command])
        assert "no cell of these studies has finished in studies_out" in capsys.readouterr().err
        return
    if "my_loggers.yaml" in command:  # the last block before it, as the page has it
        all_at_once = blocks(ROOT / "docs/loggers.md", "yaml")[-1]
        (at_root / "my_loggers.yaml").write_text(all_at_once, encoding="utf-8")
    given = {"config.yaml", "lightning_logs/version_0/config.yaml", "data.yaml"}  # of a site, a run and statistics
    for name in given & {*command}:
        (at_root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(QUICKSTART, at_root / name)
    if not any(option.endswith(".help") or option == "--print_config" for option in command):
        command = (*command, "--print_config")
    with pytest.raises(SystemExit) as ended:
        main([*command])
    assert ended.value.code == 0, capsys.readouterr().err


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def told_runs() -> list[tuple[Path, str, str]]:
    """Runs whose output a page shows right after them: the page, the command or the program, the output."""
    shown = r"^```(?:bash|python)\n([^`]*?)^```\n+```text\n((?:[^`\n]+\n){0,2}round 0 .*?)^```"
    pages = [(page, re.findall(shown, TEXT[page], re.MULTILINE | re.DOTALL)) for page in GUIDES]
    return [(page, code, output) for page, found in pages for code, output in found]


def same(told: str, line: str) -> bool:
    """Whether a line says what the page says; times are a machine's own, and another one rounds in its own way."""
    told, line = (re.sub(r"[\d.]+ s$", "", text.rstrip()).replace("─", "").replace("━", "") for text in (told, line))
    if " ".join(NUMBER.sub("", told).split()) != " ".join(NUMBER.sub("", line).split()):
        return False
    slack = 1.0 if " PCK " in told else 0.01  # of some hundred joints in percent, a few lie at the threshold
    values = zip(NUMBER.findall(told), NUMBER.findall(line), strict=True)
    return all(float(ours) == pytest.approx(float(theirs), rel=0.02, abs=slack) for ours, theirs in values)


@pytest.mark.long
@pytest.mark.parametrize(("page", "code", "output"), told_runs(), ids=lambda part: name(part)[:60])
def test_runs_give_what_the_pages_show(
    page: Path, code: str, output: str, at_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the digit on the machine that they were written on; a table's lines are as wide as their numbers."""
    if "notes.yaml" in code:
        pytest.importorskip("datasets")
    runpy.run_path(str(ROOT / "examples/gallery/draw.py"), run_name="__main__")
    capsys.readouterr()
    if code.startswith("lit-fed"):
        main(shlex.split(code.replace("\\\n", ""), comments=True)[1:])
    else:
        new = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        )  # its weights are a new process's
        print(new.stdout)
    given = capsys.readouterr().out.splitlines()
    for line in output.splitlines():
        assert line == "…" or any(same(line, one) for one in given), f"{page.name} shows {line}"


def test_first_screens_show_the_output_of_a_run() -> None:
    assert {name(page) for page, _, _ in told_runs()} == {"README.md", "docs/index.md", "docs/gallery.md"}


@pytest.mark.long
def test_the_quickstart_ends_where_the_readme_says(at_root: Path) -> None:
    told = re.search(r"ends at ([\d.]+) % on the shared test set", TEXT[ROOT / "README.md"])
    assert told is not None
    main(["fit", "-c", QUICKSTART, *QUICK])
    reached = float(rows(at_root / "lightning_logs/version_0/metrics.csv")[-1]["global/acc"])
    assert 100 * reached == pytest.approx(float(told[1]), abs=1)


def test_every_kind_of_data_in_the_gallery_has_a_command_and_a_picture() -> None:
    _, *sections = re.split(r"^## ", TEXT[ROOT / "docs/gallery.md"], flags=re.MULTILINE)
    assert [section.splitlines()[0] for section in sections] == [
        *("Poses", "Text", "Sensors", "Tables"),
        *("Statistics", "Data sets by name", "Domains", "Language"),
    ]
    for section in sections:
        assert re.search(r"^lit-fed fit -c", section, re.MULTILINE)
        (picture,) = re.findall(r"^!\[.+\]\((.+\.png)\)$", section, re.MULTILINE)
        assert (ROOT / "docs" / picture).is_file()


def test_mistakes_are_told_as_the_docs_say(at_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = re.findall(r"^\$ lit-fed (.*)\n(lit-fed: error: .*)$", GUIDE, re.MULTILINE)
    assert len(told) > 1
    for command, message in told:
        with pytest.raises(SystemExit):
            main(shlex.split(command))
        assert capsys.readouterr().err.strip() == message


@pytest.mark.long
def test_commands_of_the_first_screen_train(at_root: Path) -> None:
    """Every command with a module or a method of one's own, for one round."""
    own = [c for c in COMMANDS if c[0] == "fit" and {"--model", "examples/"} & {w[:9] for w in c} and "-c" in c]
    own += [c for c in COMMANDS if c[0] == "fit" and "net.Net" in c and c not in own]
    own = [c for c in own if not any("gallery" in word or word == "data.yaml" for word in c)]  # tested apart
    assert any("net.Net" in command for command in own)
    (made,) = (one for one in blocks(ROOT / "docs/own_data.md", "python") if '"patients.csv"' in one)
    exec(made, {})
    for command in COMMANDS:  # what the others read
        if command[0] == "statistics" and "--output" in command and any(command[-1] in one for one in own):
            main([*command])
    for number, command in enumerate(own):
        main([*command, "--trainer.max_rounds", "1", "--trainer.local_epochs", "1", *QUICK])
        assert rows(at_root / f"lightning_logs/version_{number}/metrics.csv")


@pytest.mark.long
def test_checkpoint_commands_of_the_readme_work(at_root: Path) -> None:
    short = ["--trainer.local_epochs", "1", *QUICK]
    main(["fit", "-c", "configs/quickstart.yaml", "--trainer.max_rounds", "2", *short])
    told = [command for command in commands_of(ROOT / "README.md") if "--ckpt_path" in command]
    assert {command[0] for command in told} == {"fit", "validate", "test", "predict"}
    for command in told:
        main([*command, "--trainer.max_rounds", "3", *short])
    assert len((at_root / "predictions.csv").read_text().splitlines()) == 360  # a header and the 359 test digits
    assert (at_root / "client_3.npz").is_file()
    run = at_root / "lightning_logs/version_0"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.csv", "clients.csv", "partition.json", "checkpoints"} <= names
    for column in rows(run / "metrics.csv")[0]:
        stem = re.sub(r"^val/|_(mean|weighted|std|p10|min|worst|worst10|missing)$", "", column)
        assert f"`{column}" in GUIDE or stem in GUIDE, f"metrics.csv has a column {column} that the docs do not explain"


# --- tables, links, sizes --------------------------------------------------------------------------------------------


def test_every_class_is_in_the_tables() -> None:
    import lit_fed.data
    import lit_fed.engine.evaluation.protocols
    import lit_fed.federation.server.arrivals
    import lit_fed.methods
    import lit_fed.participation.base

    def leaves(base: type) -> set[str]:
        own = [base, *(c for c in base.__subclasses__() if c.__module__.startswith("lit_fed"))]
        below = set().union(*(leaves(c) for c in own[1:])) if own[1:] else set()
        public = not base.__name__.startswith("_") and not getattr(base, "__abstractmethods__", None)
        return below | ({base.__name__} if public else set())

    named = leaves(lit_fed.participation.Participation) | leaves(lit_fed.engine.evaluation.protocols.Protocol)
    named |= leaves(lit_fed.data.Partition) | leaves(FederatedDataModule)
    exported = {one for one in vars(lit_fed.methods).values() if isinstance(one, type)}
    named |= {one.__name__ for one in exported if issubclass(one, Algorithm | Regularizer)} - {"ServerOptimizer"}
    assert {"UniformParticipation", "Arrivals", "PersonalTest", "Dirichlet", "ArrayFile", "Scaffold", "LD"} <= named
    assert not [name for name in sorted(named) if f"`{name}`" not in GUIDE]


def test_words_have_the_keys_that_exist_and_one_meaning() -> None:
    text = TEXT[ROOT / "docs/glossary.md"]
    keys = set(re.findall(r"`trainer\.(\w+)`", text))
    assert {"participation", "kinds", "max_rounds"} <= keys <= signature(FederatedTrainer).parameters.keys()
    meanings = re.findall(r"^\| ([^|]+) \|", text.partition("## One word each")[0], re.MULTILINE)
    words = [word for word in meanings if word not in ("word", "for a first run")]
    assert len(words) == len(set(words))


def test_every_method_has_a_row_of_what_it_needs_and_a_family_in_the_readme() -> None:
    table = TEXT[ROOT / "docs/methods.md"].partition("## What each method needs")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    files = {file for row in rows for file in re.findall(r"`(\w+)`", row[-1])}
    assert files == {path.stem for path in ROOT.glob("configs/method/*.yaml")}
    families = TEXT[ROOT / "README.md"].partition("| family | methods |")[2].partition("\n\n")[0].lower()
    named = {method.strip() for line in families.splitlines()[2:] for method in line.split("|")[2].split(",")}
    missing = {method.strip().lower() for row in rows for method in row[0].split(",")} - named
    assert missing == {"client momentum"}, "a momentum around other methods, for robust rules"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/from_flower.md", "CHANGELOG.md"])
def test_the_number_of_methods_is_that_of_their_files(page: str) -> None:
    numbers = re.findall(r"(?:any of |each of the |\[|\*\* )(\d+) methods", TEXT[ROOT / page])
    assert set(map(int, numbers)) == {len([*ROOT.glob("configs/method/*.yaml")])}


def test_the_readme_is_short_and_says_things_once() -> None:
    """Its rest lives in docs/; a sentence that stands on two pages would be corrected on one of them."""
    assert len(TEXT[ROOT / "README.md"].splitlines()) <= 210
    seen: dict[str, Path] = {}
    for page in [*GUIDES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"^```.*?^```", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
        for sentence in re.split(r"(?<=[.:])\s|\n\n|\|", " ".join(prose.split(" "))):
            words = " ".join(sentence.split())
            if len(words) > 80:
                assert seen.setdefault(words, page) == page, f"{name(page)} and {name(seen[words])}: {words}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_every_page_can_be_reached() -> None:
    for page in ROOT.glob("docs/**/*.md"):
        linked = [other for other in PAGES if other != page and re.search(rf"\]\([^)]*{page.name}[)#]", TEXT[other])]
        assert linked, f"no page links to {name(page)}"


def test_all_pages_of_the_index_are_all_guides() -> None:
    """The parts of the architecture are linked by its page, and the results by theirs."""
    listed = re.findall(r"\]\((\w+\.md)[)#]", TEXT[ROOT / "docs/index.md"].partition("## All pages")[2])
    guides = [
        page.name for page in ROOT.glob("docs/*.md") if not page.name.startswith(("architecture_", "from_", "index"))
    ]
    assert [page for page in guides if page not in listed] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    text = TEXT[page]
    for file in set(re.findall(r"`((?:lit_fed|configs|tests|examples|benchmarks|docs)/[\w./-]+)`", text)):
        assert (ROOT / file).exists(), f"{page.name} names {file}"
    for file, test in set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{page.name} names {file}::{test}"
    for cls in set(re.findall(r"`lit_fed((?:\.\w+)+\.[A-Z]\w+)`", text)):
        module, _, attribute = f"lit_fed{cls}".rpartition(".")
        __import__(module)
        assert hasattr(sys.modules[module], attribute), f"{page.name} names lit_fed{cls}"


def test_pictures_are_small() -> None:
    assert all(path.stat().st_size < 150_000 for path in (ROOT / "docs").iterdir() if path.is_file())


# --- the examples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", ["my_module", "my_data", "my_method"])
def test_examples_train_from_their_files(example: str, at_root: Path) -> None:
    settings = yaml.safe_load((at_root / f"examples/{example}.yaml").read_text())
    assert any(part.get("class_path", "").startswith(f"examples.{example}.") for part in settings.values())
    main(["fit", "-c", QUICKSTART, "-c", f"examples/{example}.yaml", "--trainer.max_rounds", "8", *QUICK])
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
    model = Classifier("mlp", num_classes=data.num_classes, input_shape=data.input_shape, in_channels=16)
    algorithm = FedAvg()
    made = trainer(tmp_path, max_rounds=5)
    made.fit(model, data, algorithm)
    assert made.test(model, data, algorithm)["global/acc"] > 0.8


# --- the notebooks ---------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted({*(ROOT / "examples/notebooks").glob("*.py")} - {Path(write_notebooks.__file__)})


def printed(cell: dict[str, Any]) -> list[str]:
    return [line for output in cell.get("outputs", []) for line in output.get("text", [])]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_its_sources_cells_and_outputs(notebook: Path) -> None:
    book = json.loads(notebook.with_suffix(".ipynb").read_text(encoding="utf-8"))
    cells = [cell | {"outputs": []} if "outputs" in cell else cell for cell in book["cells"]]
    assert cells == write_notebooks.cells_of(notebook), "run examples/notebooks/write_notebooks.py"
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    title, first, *_ = cells
    github = PROJECT["urls"]["Source"].removeprefix("https://github.com")
    opened = f"https://colab.research.google.com/github{github}/blob/main/examples/notebooks/{notebook.stem}.ipynb"
    assert title["source"][-1].endswith(f"]({opened})")
    package = "lit-fed[privacy]" if "privacy" in notebook.stem else "lit-fed"
    assert first["source"][-1].strip() == f'%pip install --quiet "{package} @ git+{PROJECT["urls"]["Source"]}"'
    assert [line for cell in book["cells"] for line in printed(cell)]


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_to_the_outputs_that_they_show(notebook: Path, tmp_path: Path) -> None:
    """From the first cell to the last, where nothing else is."""
    if "ClientLevel" in notebook.read_text(encoding="utf-8"):
        pytest.importorskip("dp_accounting")
    shown = json.loads(notebook.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    cells = write_notebooks.cells_of(notebook)
    write_notebooks.run(cells, tmp_path)
    for cell, before in zip(cells, shown, strict=True):
        kinds = [output["output_type"] for output in cell.get("outputs", [])]
        assert kinds == [output["output_type"] for output in before.get("outputs", [])]
        for line, told in zip(printed(cell), printed(before), strict=True):
            assert same(told, line), f"{notebook.stem} shows {told} and printed {line}"


@pytest.mark.long
def test_the_first_notebook_ends_with_the_file_of_its_run(at_root: Path) -> None:
    cells = write_notebooks.cells_of(ROOT / "examples/notebooks/first_federation.py")
    write_notebooks.run(cells, at_root)
    assert "first_federation.yaml" in cells[-1]["source"][0]
    main(["fit", "-c", "first_federation.yaml"])
    near, again = (saved_weights(at_root / f"lightning_logs/version_{number}") for number in (1, 2))
    assert_same(near, again)  # version_0 is FedAvg's


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_cells(notebook: Path) -> None:
    """What Jupyter shows as text is a comment in every line, and a title comes first."""
    first, *cells = re.split(r"^# %%", notebook.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert not first
    assert cells[0].startswith(" [markdown]\n# # ")
    assert sum(cell.startswith("\n") for cell in cells) >= 3
    for cell in cells:
        if cell.startswith(" [markdown]"):
            assert all(line.startswith("#") for line in cell.splitlines()[1:] if line.strip())
