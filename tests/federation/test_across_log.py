"""The audit log of a server, its copies for collectors, and the command that checks a log and prints it."""

from __future__ import annotations

import io
import json
import re
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.engine.storage.chain import Chain, ChainReading
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.federation import audit as module
from lit_fed.federation.audit import NAME, Audit, audit_log, hash_of
from lit_fed.federation.messages.settings import agreed
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.transport.grid import MemoryGrid
from lit_fed.methods import FedAvg
from lit_fed.privacy import ClientLevel
from tests.federation.support import Make, nodes_of, small
from tests.support import ROOT, Points, Unlucky


def lines(folder: Path) -> list[dict[str, Any]]:
    return [content for _, content in ChainReading(folder / NAME)]


def serve(make: Make, folder: Path, homes: list[list[int]], ckpt_path: str | None = None, **kwargs: Any) -> Path:
    """Train over nodes in this process, as `lit-fed federate` does; return the log's folder."""
    nodes = nodes_of(make, folder, homes)
    made, *parts = make(folder)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        log = stack.enter_context(audit_log(folder / "audit", None))
        grid = MemoryGrid({place + 1: node.handle for place, node in enumerate(nodes)})
        federate(grid, made, *parts, ckpt_path, audit=log, **kwargs)
    return folder / "audit"


def events(folder: Path) -> list[str]:
    return [line["event"] for line in lines(folder)]


# ---------------------------------------------------------------------- a server's log


def test_a_servers_log_tells_of_nodes_runs_and_rounds(tmp_path: Path) -> None:
    serve(small(), tmp_path, [[0], [1]])
    folder = serve(small(max_rounds=3), tmp_path, [[0], [1]], "last")
    whole = lines(folder)
    rounds = ["asked", "round"]
    gathered = ["start", "line", "line", "line"]
    assert events(folder) == [*gathered, "began", *rounds, *rounds, "end", *gathered, "resumed", *rounds, "end"]
    assert whole[1]["text"] == "node 1 connected with client 0: 1 of 2 clients are connected"
    began, resumed = (line for line in whole if line["event"] in ("began", "resumed"))
    assert began["run"] == resumed["run"]
    assert (began["round"], resumed["round"]) == (0, 2)
    assert (resumed["of"], resumed["folder"]) == (3, "version_0")
    asked = [line for line in whole if line["event"] == "asked"]
    assert [(line["round"], line["asked"], line["clients"]) for line in asked] == [
        (round_idx, ["train", "global", "clients"], [0, 1]) for round_idx in range(3)
    ]


def test_both_ends_write_one_hash_of_the_settings_that_must_match(tmp_path: Path) -> None:
    """What each end has of its own is not in it."""
    server, node, other = (
        hash_of(agreed(f"trainer: {{seed: {seed}}}\ndata: {{init_args: {{root: {root}}}}}"))
        for seed, root in ((1, "a"), (1, "b"), (2, "a"))
    )
    assert server == node != other
    folder = serve(small(), tmp_path, [[0], [1]])
    (made,) = nodes_of(small(), tmp_path / "other", [[0]])
    assert next(line["settings"] for line in lines(folder) if line["event"] == "began") == hash_of(made.settings)


def test_a_refused_node_and_a_failed_client_are_in_the_log_with_their_causes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no node connected for client 1"):
        serve(small(), tmp_path, [[0], [0]], gathering=Gathering(0.2))
    *_, refused, end = lines(tmp_path / "audit")
    assert (refused["event"], end["why"]) == ("warning", "ConfigError")
    assert refused["text"] == "refused node 2: nodes 1 and 2 both claim client 0; stop one of them"
    make = small(data=lambda: Points(num_clients=9), algorithm=Unlucky)
    with pytest.raises(ClientFailure) as failed:
        serve(make, tmp_path / "other", [[*range(9)]])
    assert lines(tmp_path / "other" / "audit")[-1]["why"] == str(failed.value)
    assert "camera" not in (tmp_path / "other" / "audit" / NAME).read_text()  # the cause is on its node


def test_a_private_run_writes_its_budget_and_nobody_who_takes_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside rounds and ε, the log has lines that the console has."""
    pytest.importorskip("dp_accounting")
    private = {"privacy": ClientLevel(0.5, 1.0, delta=0.01, key_file=str(tmp_path / "run.key"))}
    make = small(algorithm=lambda: FedAvg(weighting="uniform"), on_client_failure="skip", **private)
    folder = serve(make, tmp_path, [[0], [1]])
    printed = capsys.readouterr().out
    for line in lines(folder):
        if line["event"] in ("line", "warning"):
            assert line["text"] in printed
        else:
            assert not line.get("clients")
            assert "bytes" not in line
    spent = [float(line["epsilon"]) for line in lines(folder) if line["event"] == "round"]
    assert 0 < spent[0] < spent[1]


def test_a_log_is_its_users_alone_and_has_one_writer(tmp_path: Path) -> None:
    with audit_log(tmp_path / "audit", None) as log:
        log.write("asked")
        with (
            pytest.raises(ConfigError, match=r"the log .*audit is used by process"),
            audit_log(tmp_path / "audit", None),
        ):
            pass
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "audit" / NAME).stat().st_mode) == 0o600
    assert events(tmp_path / "audit") == ["start", "asked", "end"]


def test_a_log_that_was_changed_is_reported_where_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with audit_log(tmp_path, None):
        pass
    path = tmp_path / NAME
    path.write_text(path.read_text().replace('"start"', '"begin"'))
    with audit_log(tmp_path, None):
        pass
    assert f"WARNING {path}: {NAME}, line 2 does not follow {NAME}, line 1; lit-fed log {tmp_path} lists what" in (
        capsys.readouterr().out
    )


# ---------------------------------------------------------------------- copies


def test_a_copy_of_each_line_goes_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Audit(tmp_path, "stdout")
    log.write("asked", round=3)
    log.say("said")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert printed == (tmp_path / NAME).read_text().splitlines()


def test_a_copy_of_each_line_goes_to_syslog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facility 10, security, and severity 6: priority 10 · 8 + 6 = 86 (RFC 5424, 6.2.1)."""
    place = tmp_path / "log"
    monkeypatch.setattr(module, "_SYSLOG", str(place))
    with pytest.raises(ConfigError, match=r"--log is syslog, and there is no .*log; start its service, or choose"):
        Audit(tmp_path, "syslog")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as collector:
        collector.bind(str(place))
        Audit(tmp_path, "syslog").write("asked", round=3)
        sent = collector.recv(4096).rstrip(b"\0")
    assert sent == b"<86>" + (tmp_path / NAME).read_bytes().rstrip(b"\n")


def test_a_collector_that_is_gone_is_one_line_and_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "log"
    monkeypatch.setattr(module, "_SYSLOG", str(place))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as collector:
        collector.bind(str(place))
        log = Audit(tmp_path, "syslog")
    log.write("asked", round=3)
    assert capsys.readouterr().out.endswith("WARNING syslog did not take a line of the audit log\n")
    assert events(tmp_path) == ["asked"]


# ---------------------------------------------------------------------- lit-fed log


class Terminal(io.StringIO):
    """A terminal of 200 columns."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_decision_is_a_line_of_whole_values_between_tabs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value of 400 characters is in one line, and no value has a tab or an end of a line."""
    with audit_log(tmp_path, None) as log:
        log.say("x" * 400)
        log.write("asked", asked=["a\tb\nc"], run="0" * 16, round=1)
    capsys.readouterr()
    main(["log", str(tmp_path)])
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()[:-1]]
    names = ["at", "event", "round", "clients", "asked", "left", "epsilon", "refused", "more"]
    assert rows[0] == names  # whatever the log holds, so that programs find a column
    assert {len(row) for row in rows} == {len(names)}
    assert [row[1] for row in rows[1:]] == ["start", "line", "asked", "end"]
    assert rows[2][-1] == f"text: {'x' * 400}"
    assert rows[3][4] == "a\\tb\\nc"


def test_lines_since_a_time_are_printed_and_the_whole_log_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = Chain(tmp_path / NAME)
    for at in ("2026-11-28 23:59:59Z", "2026-11-29 04:29:59Z", "2026-11-29 04:30:00Z"):
        chain.append({"at": at, "event": "line"})
    for since, count in {"2026-11-29": 2, "2026-11-29 04:30": 1, "2026-11-29 04:30:00": 1, "2027-01-01": 0}.items():
        main(["log", str(tmp_path), "--since", since])
        assert capsys.readouterr().out.count("line\t") == count
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text().replace("23:59:59", "23:59:58"))
    _, err = printed(["log", str(tmp_path), "--since", "2026-11-29", "wrong"], capsys)
    assert "line 2 does not follow" in err
    _, err = printed(["log", str(tmp_path), "--since", "yesterday", "wrong"], capsys)
    assert err == "lit-fed: error: --since is 'yesterday'; it must be a time in UTC, such as '2026-11-29 04:30'\n"


def some_log(folder: Path) -> Path:
    with audit_log(folder, None, clients=[0, 1]) as log:
        of_round = {"run": "0123456789abcdef", "round": 4}
        log.write("asked", asked=["train"], **of_round)
        left, refused = {"metrics + update": 50362}, {"OSError: No space left on device": 2}
        log.write(
            "answered", asked={"train": 2}, clients=[0, 1], left=left, refused=refused, epsilon="0.25", **of_round
        )
        log.write("asked", asked=["ask clients test"], run="0123456789abcdef", round=5)
    return folder


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What the command prints, without the table's lines and breaks, and its error."""
    with pytest.raises(SystemExit) if "wrong" in words else ExitStack():
        main([word for word in words if word != "wrong"])
    out, err = capsys.readouterr()
    return " ".join(out.replace("│", " ").replace("┃", " ").split()), err


def test_a_log_is_a_table_of_what_was_asked_and_what_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = some_log(tmp_path / "audit")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    main(["log", str(folder)])
    out = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert "┏━" in out
    assert "epsilon" in out
    out = " ".join(re.sub("[│┃]", " ", out).split())
    for words in ("metrics + update (50362)", "train (2)", "0.25", "0, 1", "OSError: No space left on device (2)"):
        assert words in out
    assert out.count("asked ") == 2  # the heading, and the round of which no answer is written
    assert "ask clients test" in out
    assert ChainReading(folder / NAME).to_the_end().last in out


def test_a_changed_log_is_refused_by_file_and_line_and_a_torn_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = some_log(tmp_path / "audit")
    path, noted = folder / NAME, ChainReading(folder / NAME).to_the_end().last
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"at":"2026')
    out, _ = printed(["log", str(folder), "--noted", noted], capsys)
    assert f"torn {NAME}, line 6: a kill or a loss of power cut the line off" in out
    assert "metrics + update" in out
    path.write_bytes(whole.replace(b"50362", b"50361"))
    out, err = printed(["log", str(folder), "wrong"], capsys)
    assert err == f"lit-fed: error: {path} was changed: {NAME}, line 4 does not follow {NAME}, line 3\n"
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    out, err = printed(["log", str(folder)], capsys)
    assert err == ""
    _, err = printed(["log", str(folder), "--noted", noted, "wrong"], capsys)
    assert err.endswith(f"no line has the SHA-256 {noted}; it is mistyped, or the log was cut off or written anew\n")


@pytest.mark.parametrize("line", ["[]", "{}", '{"previous": 3}', "x" * 10_000, "[" * 10_000, "\x1b[2J", "\ud800"])
def test_a_line_that_holds_anything_is_named_and_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    folder = some_log(tmp_path / "audit")
    raw = line.encode(errors="surrogatepass")
    whole = (folder / NAME).read_bytes().splitlines(keepends=True)
    (folder / NAME).write_bytes(b"".join([*whole[:2], raw + b"\n", *whole[3:]]))
    out, err = printed(["log", str(folder), "wrong"], capsys)
    assert err.endswith(f"{NAME}, line 4 does not follow {NAME}, line 3\n")
    odd = {"previous": json.loads(whole[2])["previous"], "left": 3, "asked": [[1]], "round": {}, "at": "\x1b[2J"}
    (folder / NAME).write_bytes(b"".join([*whole[:2], json.dumps(odd).encode() + b"\n", *whole[3:]]))
    out, err = printed(["log", str(folder), "wrong"], capsys)
    assert err.endswith(f"{NAME}, line 4 does not follow {NAME}, line 3\n")
    assert "\x1b" not in out


def test_a_folder_without_a_log_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = printed(["log", str(tmp_path), "wrong"], capsys)
    assert err == f"lit-fed: error: there is no {tmp_path / NAME}; name the folder of a log, such as state/audit\n"


def test_the_command_answers_without_pytorch(tmp_path: Path) -> None:
    code = "import sys; from lit_fed.command.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "log", str(some_log(tmp_path / "audit"))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
