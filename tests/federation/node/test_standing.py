"""A node that stands starts what its site has approved, by the hash that a server names, and nothing else."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from lit_fed import __version__
from lit_fed.command.cli import main
from lit_fed.command.command import Call
from lit_fed.command.parsers import make_parsers
from lit_fed.command.reading.words import CommandLine
from lit_fed.command.roots import import_named
from lit_fed.errors import ConfigError
from lit_fed.federation.commands.node import make_standing_node
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.wire import PROTOCOL, Message, decode, encode
from lit_fed.federation.node.standing import Standing
from lit_fed.federation.transport.security import Security

FILE = """\
config: common.yaml
trainer: {{max_rounds: 2, seed: {seed}}}
"""
COMMON = """\
trainer: {accelerator: cpu, devices: 1, num_threads: 1}
model: {class_path: Classifier, init_args: {network: logistic}}
data: {class_path: Digits, init_args: {num_clients: 2, seed: 1}}
algorithm: FedAvg
"""
WORDS = ["node", "--standing", ".", "--client", "0", "--state_dir", "state"]


@pytest.fixture
def standing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standing]:
    """A node of a site with three configurations, of which it has approved two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", None)  # a node with other code sets both
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    Path("common.yaml").write_text(COMMON)
    above, below = pty.openpty()
    with open(below, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        for seed, name in enumerate(("a", "b", "c")):
            Path(f"{name}.yaml").write_text(FILE.format(seed=seed))
            if name != "c":
                Path("folder.yaml").mkdir(exist_ok=True)  # is none of the configurations
                os.write(above, b"y\n")
                main(["node", "-c", f"{name}.yaml", *WORDS[1:], "--approve"])
    os.close(above)
    import_named()
    parser = make_parsers(WORDS, "node".__eq__)[1]["node"]
    node = make_standing_node(Call(CommandLine(WORDS).parse(parser), parser, WORDS), Security())
    said: list[str] = []
    node.say = said.append
    vars(node)["said"] = said
    with node.at_work():
        yield node


def hash_of(name: str) -> str:
    return sha256(Path(name).read_bytes()).hexdigest()


def greet(node: Standing, config: str) -> Message:
    """The answer to a greeting of a server with other settings, which names its configuration."""
    return decode(node.handle(encode(Message.pack(schema.Hello(PROTOCOL, __version__, {"trainer.seed": "9"}, config)))))


def cause(answer: Message) -> str:
    return answer.read(schema.WorkFailure).cause


def test_what_is_approved_is_started_by_its_hash_and_another_one_after_it(standing: Standing) -> None:
    for name, seed in {"a": 0, "b": 1, "a ": 0}.items():
        answer = cause(greet(standing, hash_of(f"{name.strip()}.yaml")))
        first = "algorithm.class_path is "  # the first setting that the server lacks: the node compares by itself
        assert answer.startswith(first), answer
        assert standing._node is not None
        assert standing._node.trainer.settings.seed == seed
        assert standing._node.given is standing._given


@pytest.mark.parametrize(
    "named", ["c.yaml", "common.yaml", "", "0" * 64], ids=["asked nobody", "a part", "none", "no file"]
)
def test_what_is_not_approved_is_refused_and_ends_the_run_before(standing: Standing, named: str) -> None:
    greet(standing, hash_of("a.yaml"))
    config = hash_of(named) if named.endswith(".yaml") else named
    assert cause(greet(standing, config)) == f"the node has not approved configuration {config[:16]}; its log says why"
    asked = encode(Message.pack(schema.ListStates("0" * 16)))
    assert cause(decode(standing.handle(asked))) == "the node stands, and has started no configuration"
    greet(standing, hash_of("b.yaml"))
    assert standing._node is not None


def test_a_server_hears_nothing_of_the_sites_files(standing: Standing) -> None:
    """A file that an approved one includes has changed: the site hears how."""
    Path("common.yaml").write_text(COMMON.replace("logistic", "mlp"))
    told = cause(greet(standing, hash_of("a.yaml")))
    assert told == f"the node has not approved configuration {hash_of('a.yaml')[:16]}; its log says why"
    assert 'changed model.network: "logistic" → "mlp"' in vars(standing)["said"][-1]


def test_what_is_approved_and_cannot_be_made_is_told_without_the_reason(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_path: Path) -> None:
        raise FileNotFoundError("/srv/secret")

    standing.start = fails  # type: ignore[assignment]
    told = cause(greet(standing, hash_of("a.yaml")))
    assert told == f"the node cannot start configuration {hash_of('a.yaml')[:16]}; its log says why"


def test_what_is_no_message_is_answered(standing: Standing) -> None:
    assert "are not a message" in cause(decode(standing.handle(b"x")))
    standing.idle()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--status_port", "9"], "--until_done and --status_port are for one run; leave them out with --standing"),
        (["--statistics", "5"], "--statistics answers nothing else, and --standing trains; start a node for each"),
    ],
)
def test_what_a_standing_node_does_not_do_is_refused(standing: Standing, words: list[str], line: str) -> None:
    """A site that approves statistics alone would have trained."""
    words = [*WORDS, *words]
    parser = make_parsers(words, "node".__eq__)[1]["node"]
    with pytest.raises(ConfigError, match=line):
        make_standing_node(Call(CommandLine(words).parse(parser), parser, words), Security())


def test_approve_needs_a_file(standing: Standing, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*WORDS, "--approve"])
    assert capsys.readouterr().err == "lit-fed: error: --approve asks about a configuration; name one with --config\n"
