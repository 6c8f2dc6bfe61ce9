"""A run that forgets a client is, bit for bit, the run from scratch in which the client is absent."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.command.cli import main
from lit_fed.engine.storage.store import read_table
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import FullParticipation
from lit_fed.record.check import Check
from tests.federation.support import deploy, simulate, small
from tests.methods.run_methods import words_of
from tests.record.test_callback import SHARED
from tests.support import Points, fit, run_cli

KEEP = "[{class_path: Checkpoint, init_args: {keep_every: 1}}]"
ALONE = ["--data.init_args.val_fraction", "0", "--trainer.protocols", "[GlobalTest]"]
"""No client's sample is in an evaluation, so that a run may begin again where a client is first selected."""
RECORDED = ["--trainer.record", "true", "--trainer.callbacks", KEEP]
DAY = ["fedavg", "scaffold", "ditto"]
LONG = ["fedper", "fedbuff_asynchronous", "afl", "fedamp", "ditto_kept", "ifca", "fedsa_lora", "fedyogi", "suwa"]

ANEW = ["fedbuff_asynchronous"]


def words(method: str, folder: Path, rounds: int = 4, *more: str) -> list[str]:
    return ["fit", *words_of(method, folder, rounds), *RECORDED, *ALONE, *more]


def folder_of(root: Path, number: int = 0) -> Path:
    return root / "lightning_logs" / f"version_{number}"


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """The lines of rounds, but for times and files."""
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [{key: line[key] for key in SHARED if key in line} for line in lines if "server" in line]
    for line in found:
        line["metrics"] = {name: one for name, one in line["metrics"].items() if not name.startswith("time/")}
    return found


def state_of(run: Path) -> dict[str, Any]:
    """The server's state, the models and the checksum of each client's state after the last round."""
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    kept = {key: content[key] for key in ("round_idx", "server", "models", "state_dict", "initial")}
    return {**kept, "clients": read_table(content["clients"])}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def met(run: Path) -> dict[int, int]:
    """The first round in which each client was selected."""
    found = dict[int, int]()
    for line in rounds_of(run):
        for client_id in line["cohort"]:
            found.setdefault(int(client_id), line["round"])
    return found


def clients_of(run: Path) -> list[str]:
    """The rows of single clients, but for times."""
    return [line for line in (run / "clients.csv").read_text(encoding="utf-8").splitlines() if ",time_s," not in line]


def updates(run: Path) -> set[str]:
    """The clients whose updates have arrived."""
    return {client_id for line in rounds_of(run) for client_id in line["updates"]}


def forgotten(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit status and output."""
    capsys.readouterr()
    try:
        main(["forget", *map(str, arguments)])
    except SystemExit as end:
        told = capsys.readouterr()
        return int(end.code or 0), told.out + told.err
    return 0, capsys.readouterr().out


def check(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Forget the client that is met last, and compare with the run from scratch; returns what was told."""
    main(words(method, tmp_path / "one", 4, *more))
    run = folder_of(tmp_path / "one")
    client_id, _ = max(met(run).items(), key=lambda one: one[1])
    status, told = forgotten(capsys, run, "--client", str(client_id))
    assert status == 0, told
    main([*words(method, tmp_path / "two", 4, *more), "--trainer.participation.absent", f"[{client_id}]"])
    new, scratch = folder_of(tmp_path / "one", 1), folder_of(tmp_path / "two")
    assert rounds_of(new) == rounds_of(scratch)
    assert clients_of(new) == clients_of(scratch)
    assert same(state_of(new), state_of(scratch))
    assert not same(state_of(new)["server"], state_of(run)["server"])
    assert list(Check(new).run()) == []
    return told


@pytest.mark.parametrize("method", [*DAY, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)])
def test_a_forgotten_client_was_never_met(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the checkpoint before it was selected, or, where all depends on it, from the start."""
    told = check(method, tmp_path, capsys)
    assert ("from the start" in told) == (method in ANEW)


def test_the_new_record_names_the_old_and_its_rounds_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(words("scaffold", tmp_path))
    run = folder_of(tmp_path)
    order = sorted(met(run).items(), key=lambda one: one[1])
    (client_id, round_idx), before = order[-1], {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    told = forgotten(capsys, run, "--client", f"[{client_id}]")[1]
    assert (
        f"forget      {client_id}: the first round that depends on it is {round_idx}, as it was selected then" in told
    )
    assert f"run again   rounds {round_idx} to 3, from {run}/checkpoints/round={round_idx - 1}.ckpt" in told
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    new = folder_of(tmp_path, 1)
    starts = [line["facts"] for line in map(json.loads, (new / "record.jsonl").open()) if "facts" in line]
    lines = (run / "record.jsonl").read_bytes().splitlines(keepends=True)
    assert f"record: {sha256(lines[-1]).hexdigest()}" in starts[-1]["config"]
    assert "run: version_0" in starts[-1]["config"]
    main(["verify", str(new), "--rounds", "all"])
    assert "equal       rounds 0 to 3, run again from the start" in capsys.readouterr().out
    # Another one, of the new run, whose first rounds have other settings; and one that is forgotten already.
    assert forgotten(capsys, new, "--client_position", f"[{order[0][0]}]")[0] == 0
    assert not {client_id, order[0][0]} & {int(name) for name in updates(folder_of(tmp_path, 2))}
    assert "depends on no sample of" in forgotten(capsys, new, "--client", str(client_id))[1]


def test_a_checkpoint_with_a_state_of_the_client_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(words("scaffold", tmp_path))
    run = folder_of(tmp_path)
    client_id = next(iter(met(run)))
    assert forgotten(capsys, run, "--client", str(client_id))[0] == 0
    config = folder_of(tmp_path, 1) / "config.yaml"
    with pytest.raises(SystemExit):
        main(
            [
                "fit",
                "-c",
                str(config),
                "--trainer.max_rounds",
                "5",
                "--ckpt_path",
                str(run / "checkpoints/round=2.ckpt"),
            ]
        )
    assert f"holds a state of client {client_id}, which is absent" in capsys.readouterr().err


def test_who_was_never_met_is_forgotten_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(words("fedavg", tmp_path, 1))
    run = folder_of(tmp_path)
    client_id = min(set(range(8)) - met(run).keys())
    assert (
        f"equal       {run} depends on no sample of {client_id}\n"
        in forgotten(capsys, run, "--client", str(client_id))[1]
    )
    assert not folder_of(tmp_path, 1).exists()


def test_what_no_command_repeats_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(*arguments: str | Path) -> str:
        status, told = forgotten(capsys, *arguments)
        assert status == 2
        return told.splitlines()[-1]

    main(words("fedavg", tmp_path / "one", 2))
    main([*words("fedavg", tmp_path / "one", 3, "--algorithm.weighting", "uniform"), "--ckpt_path", "last"])
    run = folder_of(tmp_path / "one")
    first = str(min(met(run), key=met(run).__getitem__))
    assert f"{run} has other settings from round 2 on, after the checkpoint to begin with" in line(
        run, "--client", first
    )
    assert "--client is missing; name a client to forget" in line(run)
    assert "--client: there is no client 8; clients are 0 to 7" in line(run, "--client", "8")
    assert "has no record.jsonl" in line(tmp_path, "--client", "1")
    changed = run / "metrics.csv"
    text = changed.read_text(encoding="utf-8")
    changed.write_text(text.replace("0.", "1.", 1), encoding="utf-8")
    assert "is not what its record says: round " in line(run, "--client", "1")
    changed.write_text(text, encoding="utf-8")
    made = fit(tmp_path / "python", data=Points(4), algorithm=FedAvg(), record=True)
    assert "was started from Python" in line(made.log_dir, "--client", "1")


def test_over_nodes_it_is_done_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make(folder: Path) -> Any:
        parts = small(data=lambda: Points(4), max_rounds=2, record=True)(folder)
        parts[0].describe("trainer:\n  max_rounds: 2\n")
        return parts

    run = deploy(make, tmp_path, [[0], [1, 2], [3]]).log_dir
    status, told = forgotten(capsys, run, "--client", "1")
    assert status == 2
    assert f"{run} is of a federation on nodes, which only they repeat; start lit-fed federate with" in told


def test_three_nodes_and_a_simulation_leave_an_absent_client_out_alike(tmp_path: Path) -> None:
    participation = {"participation": FullParticipation(absent=[1])}
    make = small(data=lambda: Points(4), algorithm=Scaffold, max_rounds=3, record=True, **participation)
    simulate(make, tmp_path / "one")
    deploy(make, tmp_path / "nodes", [[0], [1, 2], [3]])
    one, other = rounds_of(folder_of(tmp_path / "one")), rounds_of(folder_of(tmp_path / "nodes"))
    for line in (*one, *other):
        del line["metrics"]  # the server of a federation has a test set of its own
    assert len(one) == 3
    assert one == other
    assert all(line["cohort"]["1"][0] == "lost_before" for line in one)


@pytest.mark.long
@pytest.mark.parametrize("method", ["scaffold", "fedper"])
def test_two_processes_forget_as_one_does(method: str, tmp_path: Path) -> None:
    more = ["--trainer.num_threads", "1", "--trainer.accelerator", "cpu"]
    done = run_cli(*words(method, tmp_path / "two", 3, *more, "--trainer.devices", "2"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = folder_of(tmp_path / "two")
    client_id, _ = max(met(run).items(), key=lambda one: one[1])
    done = run_cli("forget", str(run), "--client", str(client_id), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run again") == 1
    absent = ["--trainer.participation.absent", f"[{client_id}]"]
    main([*words(method, tmp_path / "one", 3, *more), *absent])
    new, scratch = folder_of(tmp_path / "two", 1), folder_of(tmp_path / "one")
    assert same(state_of(new), state_of(scratch))
    one, other = rounds_of(new), rounds_of(scratch)
    for line in (*one, *other):
        del line["metrics"]  # sums over clients are rounded by the number of processes
    assert one == other
