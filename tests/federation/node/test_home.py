"""A node predicts and tests with its clients' models when a run has ended, as a simulation would, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.home import Home
from lit_fed.federation.node.kept import NAME, read
from lit_fed.federation.node.node import Node
from tests.federation.support import deploy, nodes_of, small
from tests.federation.test_across_every_method import ROUNDS, parts_of
from tests.methods.run_methods import run_method, words_of
from tests.support import rows

HOMES = [[0, 1, 2], [3, 4, 5], [6, 7]]


def states(folder: Path, place: int) -> Path:
    return folder / f"node_{place}" / "states"


@pytest.mark.parametrize(
    "method", ["fedper", "scaffold", pytest.param("fedfrozen", marks=pytest.mark.long), "uwa", "fedexp"]
)
def test_a_client_predicts_at_home_what_it_predicts_in_a_simulation(tmp_path: Path, method: str) -> None:
    """Client 4 of the second node, to the bit; its metrics are those that the server was told."""
    one, other = run_method(method, tmp_path / "one", ROUNDS), tmp_path / "other"
    made = deploy(lambda root: parts_of(method, root), other, HOMES)
    words = words_of(method, tmp_path / "unused", ROUNDS)
    files = [str(tmp_path / name) for name in ("simulated.csv", "at_home.csv")]
    main(["predict", *words, "--ckpt_path", str(one), "--client", "4", "--output", files[0]])
    home = Home(*parts_of(method, tmp_path / "home"), [4], states(other, 1), "predict")
    home.predict(4, Path(files[1]))
    assert Path(files[0]).read_bytes() == Path(files[1]).read_bytes()
    found = Home(*parts_of(method, tmp_path / "home"), None, states(other, 1), "test").evaluate("test")
    assert sorted(found) == [3, 4, 5]
    told = {
        (int(row["client_id"]), f"clients/{row['metric']}"): float(row["value"])
        for row in rows(made.log_dir / "clients.csv")
        if row["stage"] == "test" and row["round"] == str(ROUNDS - 1) and int(row["client_id"]) in found
    }
    at_home = {(one, name): value for one, row in found.items() for name, value in row.items()}
    assert at_home == told


def test_the_commands_of_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(lambda root: parts_of("fedper", root), tmp_path, HOMES)
    words = [*words_of("fedper", tmp_path / "unused", ROUNDS), "--state_dir", str(tmp_path / "node_2")]
    output = tmp_path / "predictions.csv"
    capsys.readouterr()
    main(["predict", *words, "--client", "7", "--output", str(output)])
    said = capsys.readouterr().out
    assert f"wrote predictions for {len(rows(output))} samples" in said
    assert "after round 2, as " in said
    main(["test", *words])
    said = capsys.readouterr().out
    assert "clients/acc" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("│")] == ["6", "7"]
    main(["validate", *words, "--client", "[6]"])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")] == ["6"]
    for command, more, told in (
        ("predict", [], "holds the predictions of one client; name one of 6, 7 with --client"),
        ("predict", ["--client", "4"], "has no state of client 4; its clients are "),
        (
            "test",
            ["--state_dir", "nowhere"],
            "nowhere/states/last.pt does not exist; give the folder that the node ran with",
        ),
        (
            "test",
            ["--trainer.protocols", "[GlobalTest]"],
            "trainer.protocols has no protocol that asks these clients on the test",
        ),
    ):
        with pytest.raises(SystemExit):
            main([command, *words, *more])
        assert told in capsys.readouterr().err


def test_what_a_node_keeps_is_checked(tmp_path: Path) -> None:
    (node,) = nodes_of(small(), tmp_path, [[0]])
    good: dict[str, Any] = {"run": "0" * 16, "round": 0, "versions": {"0": None}, "frozen": {}}
    model = node.federation.broadcast(0).wire["model"]

    def told(tensors: Any, **changes: Any) -> str:
        return str(decode(node.handle(encode(Message("keep", {**good, **changes}, tensors)))).fields.get("cause"))

    sent = {"payload/model": model}
    assert "lacks 'network.weight'" in told({})
    for changes in ({"round": 9}, {"round": -1}, {"versions": {}}, {"versions": {"0": None, "1": None}}):
        assert "the end of the run is for other clients" in told(sent, **changes)
    assert "is malformed; run the same lit_fed" in told(sent, run="../x")
    assert "is malformed; run the same lit_fed" in told(sent, versions={"0": [1]})
    assert not list(states(tmp_path, 0).rglob(NAME))
    assert told(sent) == "None"
    assert read(states(tmp_path, 0)).versions == {0: None}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    deploy(small(), tmp_path, [[0], [1]])
    path = states(tmp_path, 0) / NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"last\.pt cannot be read"):
        read(states(tmp_path, 0))


def test_a_node_that_is_not_there_at_the_end_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def handlers(nodes: list[Node]) -> Any:
        def deaf(blob: bytes) -> bytes:
            return encode(Message("failure")) if decode(blob).word == "keep" else nodes[1].handle(blob)

        return {1: nodes[0].handle, 2: deaf}

    deploy(small(), tmp_path, [[0], [1]], handlers=handlers)
    assert "the nodes of client 1 did not save the end of the run" in capsys.readouterr().out
    assert (states(tmp_path, 0) / NAME).is_file()
    made = small()(tmp_path / "home")
    with pytest.raises(ConfigError, match="has no state of client 1; its clients are"):
        Home(*made, [1], states(tmp_path, 0), "test")
