"""Rounds that run again are equal to the record, or differ by name; checkpoints by numbers; the page about a run."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from lit_fed.command.cli import main
from lit_fed.methods import FedAvg
from tests.methods.run_methods import METHODS, ON_PUPPETS, words_of
from tests.record.test_check import edited, write
from tests.support import Points, fit, run_cli

KEEP = "[{class_path: Checkpoint, init_args: {keep_last: 9}}]"
FEW = ["fedper", "scaffold", "fedavg_asynchronous"]
MANY = [name for name in METHODS if name not in ON_PUPPETS][:20]


def trained(method: str, folder: Path, rounds: int, *words: str) -> Path:
    main(["fit", *words_of(method, folder, rounds), "--trainer.record", "true", "--ckpt_path", "last", *words])
    return folder / "lightning_logs" / "version_0"


def verified(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Exit status and output."""
    capsys.readouterr()
    try:
        main(["verify", *map(str, words)])
    except SystemExit as end:
        told = capsys.readouterr()
        return int(end.code or 0), told.out + told.err
    return 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("fedavg", tmp_path_factory.mktemp("whole"), 3, "--trainer.callbacks", KEEP)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def test_rounds_are_equal_from_the_start_and_from_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert verified(capsys, run)[0] == 0
    assert "equal       rounds 0 to 2, run again from the start\n" in verified(capsys, run, "--rounds", "all")[1]
    status, told = verified(capsys, run, "--rounds", "2")
    assert status == 0
    assert f"equal       rounds 2 to 2, run again from {run / 'checkpoints/round=1.ckpt'}" in told
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_is_forged_throughout_differs_where_its_rounds_run_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record's links are anew, and there is no checkpoint that could hold the old ones."""
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(run / "checkpoints")
    for line in lines:
        line["files"].pop("checkpoints/last.ckpt", None)
    write(run, lines, anew=True)
    client = next(iter(lines[2]["updates"]))
    edited(2, "updates", client, "sha256", anew=True)(run)
    assert verified(capsys, run)[0] == 0
    status, told = verified(capsys, run, "--rounds", "all")
    assert status == 1
    assert f"round 1: updates.{client}.sha256 is 0000" in told
    write(run, lines, anew=True)
    name = next(key for key in lines[3]["server"] if key.startswith("model."))
    edited(3, "server", name, anew=True)(run)
    assert f"round 2: server.{name} is 0000" in verified(capsys, run, "--rounds", "all")[1]


def test_another_machines_checkpoint_differs_in_bits_and_by_how_much(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs.ckpt"
    content = torch.load(run / "checkpoints/round=1.ckpt", weights_only=True)
    torch.save(content, theirs)
    assert f"equal       {theirs}\n" in verified(capsys, run, "--against", theirs)[1]
    name = next(iter(content["server"]["model"]))
    content["server"]["model"][name].view(-1)[0] = 0.0
    was = torch.load(run / "checkpoints/round=1.ckpt", weights_only=True)["server"]["model"][name].view(-1)[0].item()
    torch.save(content, theirs)
    status, told = verified(capsys, run, "--against", theirs)
    assert status == 1
    assert f"{theirs}: round 1: server.model.{name} is" in told
    assert f"most in model.{name} of the server, by {abs(was):.3g}" in told
    assert verified(capsys, run, "--against", theirs, "--within", str(abs(was) * 0.9))[0] == 1
    status, told = verified(capsys, run, "--against", theirs, "--within", str(abs(was) * 1.1))
    assert status == 0
    assert f"within      {theirs}: the bits differ, and no number of the server by more than {abs(was):.3g}" in told


def test_a_checkpoint_of_another_network_differs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = torch.load(run / "checkpoints/round=1.ckpt", weights_only=True)
    name = next(iter(content["server"]["model"]))
    content["server"]["model"][name] = torch.zeros(3)
    torch.save(content, tmp_path / "other.ckpt")
    status, told = verified(capsys, run, "--against", tmp_path / "other.ckpt", "--within", "1e9")
    assert status == 1
    assert f"most in model.{name} of the server, by inf" in told


def test_what_cannot_be_verified_is_refused_in_a_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(*words: str | Path) -> str:
        status, told = verified(capsys, *words)
        assert status in (1, 2)
        return told.splitlines()[-1]

    assert "--rounds is 2-7; the record has 0-2: give one, a range, or all" in line(run, "--rounds", "2-7")
    assert "--rounds is x" in line(run, "--rounds", "x")
    assert "--within" in line(run, "--within", "-1", "--rounds", "all")
    assert f"{tmp_path} has no record.jsonl, which a run writes with trainer.record: true" in line(tmp_path)
    made = fit(tmp_path / "python", data=Points(4), algorithm=FedAvg(), record=True)
    assert "the run was started from Python; leave --rounds out" in line(made.log_dir, "--rounds", "all")


def test_rounds_with_a_key_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dp_accounting")
    privacy = ["--trainer.privacy", "ClientLevel", "--trainer.privacy.clip_norm", "1.0"]
    privacy += ["--trainer.privacy.noise_multiplier", "1.0", "--trainer.privacy.key_file", str(tmp_path / "key")]
    few = ["--trainer.participation", "PoissonParticipation", "--trainer.participation.fraction", "0.5"]
    more = ["--algorithm.weighting", "uniform", "--trainer.on_client_failure", "skip", "--data.val_fraction", "0"]
    words = words_of("fedavg", tmp_path, 1)
    at = words.index("--trainer.participation.init_args.count")
    del words[at : at + 2]
    main(["fit", *words, "--trainer.record", "true", *few, *more, *privacy])
    run = tmp_path / "lightning_logs/version_0"
    assert verified(capsys, run)[0] == 0
    status, told = verified(capsys, run, "--rounds", "all")
    assert status == 2
    assert "another outcome would be another release" in told


def test_the_page_about_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["card", str(run)])
    page, content = (run / "card.md").read_text(encoding="utf-8"), (run / "record.jsonl").read_bytes()
    assert f"| end of record.jsonl | {sha256(content.splitlines(keepends=True)[-1]).hexdigest()} |" in page
    assert f"| configuration | {sha256((run / 'config.yaml').read_bytes()).hexdigest()} |" in page
    assert "| method | FedAvg |" in page
    accuracy = json.loads(content.splitlines()[3])["metrics"]["global/acc"]
    assert f"| `global/acc` | {accuracy:.6g} |" in page
    assert verified(capsys, run)[0] == 0
    (run / "card.md").write_text(page.replace(f"{accuracy:.6g}", "0.999"), encoding="utf-8")
    status, told = verified(capsys, run)
    assert status == 1
    assert "card.md does not say what the run's files do" in told


# ---------------------------------------------------------------------- no false alarms


@pytest.mark.parametrize("method", FEW)
def test_a_resumed_run_in_groups_raises_no_alarm(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rounds in (2, 4):
        run = trained(method, tmp_path, rounds, "--trainer.executor", "vectorized", "--trainer.num_threads", "1")
    assert "config.until_round_1.yaml" in {path.name for path in run.iterdir()}
    assert verified(capsys, run)[0] == 0
    status, told = verified(capsys, run, "--rounds", "0-3")
    assert status == 0, told


@pytest.mark.long
@pytest.mark.parametrize("executor", ["sequential", "auto"])
@pytest.mark.parametrize("method", MANY)
def test_no_alarm(method: str, executor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--trainer.executor", executor, "--trainer.num_threads", "1")
    for rounds in (2, 4):
        run = trained(method, tmp_path, rounds, *more)
    for rounds in ("0-0", "2-3"):
        status, told = verified(capsys, run, "--rounds", rounds)
        assert status == 0, told


@pytest.mark.long
@pytest.mark.parametrize("method", FEW)
def test_a_run_of_two_processes_is_equal_on_one(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", *words_of(method, tmp_path, 3, devices=2), "--trainer.record", "true", "--trainer.num_threads", "1"]
    done = run_cli(*words, "--trainer.accelerator", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    status, told = verified(capsys, tmp_path / "lightning_logs/version_0", "--rounds", "all")
    assert status == 0, told


def test_twenty_methods() -> None:
    assert len(set(MANY)) == 20
