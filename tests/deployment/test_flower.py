"""What is ours around Flower: what must be given, how messages travel together, and all of it where flwr is there."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from lit_fed.deployment.flower import RelayGrid, _opened, _parcels
from lit_fed.deployment.processes import check_free, is_loopback, running, split_address, wait_for
from lit_fed.deployment.security import Security, in_one_line
from lit_fed.deployment.stub.pipe import receive, send
from lit_fed.deployment.wire import join
from lit_fed.errors import ConfigError, ProcessLost
from tests.support import ROOT, run_cli


@pytest.mark.parametrize("address", ["127.0.0.1", "host:", ":9092", "host:port", "host:70000", "host:0", ""])
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be a host and a port, such as 127\.0\.0\.1:9092"):
        split_address(address)


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("127.1.2.3:1", True), ("0.0.0.0:1", False),
     ("192.0.2.7:1", False), ("localhost.example.org:1", False)],
)  # fmt: skip
def test_what_stays_on_this_machine(address: str, here: bool) -> None:
    assert is_loopback(address) is here


def test_what_others_can_hear_is_protected(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.touch()
    with pytest.raises(ConfigError, match=r"192.0.2.7:9092 is not on this machine, so --ca must be given; see docs/"):
        Security().check("192.0.2.7:9092", ("ca", "key"))
    with pytest.raises(
        ConfigError, match="--key is missing: TLS and keys are used together, or on loopback not at all"
    ):
        Security(ca=str(file)).check("127.0.0.1:9092", ("ca", "key"))
    with pytest.raises(ConfigError, match="--ca nowhere is no file"):
        Security(ca="nowhere").check("127.0.0.1:9092", ("ca", "key"))
    Security().check("127.0.0.1:9092", ("ca", "key"))
    Security(ca=str(file), key=str(file)).check("192.0.2.7:9092", ("ca", "key"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a server's certificate for 127.0.0.1, one that has expired, and another authority."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    folder = tmp_path_factory.mktemp("keys")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=folder, capture_output=True)

    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384")
    for name in ("ca", "foreign"):
        openssl("genpkey", *curve, "-out", f"{name}.key")
        openssl(
            "req", "-x509", "-new", "-key", f"{name}.key", "-days", "2", "-subj", f"/CN={name}", "-out", f"{name}.crt"
        )
    openssl("genpkey", *curve, "-out", "server.key")
    openssl("pkey", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    openssl("req", "-new", "-key", "server.key", "-subj", "/CN=127.0.0.1", "-out", "server.csr")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san")
    openssl("x509", "-req", *signed, "-days", "2", "-out", "server.crt")
    openssl("x509", "-req", *signed, "-days", "-1", "-out", "old.crt")
    return folder


@pytest.mark.parametrize(
    ("files", "address", "expected"),
    [
        (("ca.crt", "server.crt", "server.key"), "127.0.0.1:1", ""),
        (("ca.crt", "server.crt", "server.key"), "0.0.0.0:1", ""),
        (("ca.crt", "old.crt", "server.key"), "127.0.0.1:1", r"no node .* takes .*old.crt: certificate has expired"),
        (("foreign.crt", "server.crt", "server.key"), "127.0.0.1:1", "takes .*server.crt: .*local issuer certificate"),
        (("ca.crt", "server.crt", "server.key"), "127.0.0.2:1", "certificate is not valid for '127.0.0.2'"),
        (("ca.crt", "server.crt", "ca.key"), "127.0.0.1:1", "ca.key do not go together: key values mismatch"),
        (("ca.crt", "server.crt", "locked.key"), "127.0.0.1:1", "locked.key do not go together"),  # asks nobody for it
        (("ca.crt", "san", "server.key"), "127.0.0.1:1", "san and .* do not go together"),
        (("server.key", "server.crt", "server.key"), "127.0.0.1:1", "--ca .*server.key is no certificate"),
    ],
)
def test_a_server_finds_out_what_nodes_would_stumble_over(
    keys: Path, files: tuple[str, str, str], address: str, expected: str
) -> None:
    security = Security(*(str(keys / name) for name in files))
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        security.try_out(address)


@pytest.mark.parametrize(
    ("ca", "certificate", "expected"),
    [
        ("ca.crt", "server.crt", ""),
        ("foreign.crt", "server.crt", "foreign.crt does not vouch for the server at .*: .*local issuer certificate"),
        ("ca.crt", "old.crt", "does not vouch for the server at .*: certificate has expired"),
        ("ca.crt", "", "speaks no TLS"),
        ("", "server.crt", "speaks TLS: give --ca and --key"),
        ("", "", ""),
    ],
)
def test_a_node_looks_at_the_servers_certificate(keys: Path, ca: str, certificate: str, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            line, _ = listener.accept()
            with line, suppress(OSError):
                if not certificate:
                    line.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(keys / certificate, keys / "server.key")
                context.wrap_socket(line, server_side=True).close()

        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
            Security(str(keys / ca) if ca else None).greet(f"127.0.0.1:{listener.getsockname()[1]}")
        server.join()


def test_an_address_that_is_taken_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = f"127.0.0.1:{one.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen at {address}: address already in use; choose another"):
            check_free(address)
    check_free(address)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.7:9092: "):
        check_free("192.0.2.7:9092")


def test_what_a_program_said_is_told_from_its_beginning_and_without_its_frame() -> None:
    said = "\033[91m╭─ Error ─╮\033[0m\n│ The key is no key. │\n╰─────────╯\n"
    assert in_one_line(said) == "Error The key is no key."
    assert in_one_line("word " * 100, most=12) == "word word …"


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # nobody listens at it
        address = f"127.0.0.1:{one.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"nobody listens at {address}; start the server, or correct --superlink"):
            wait_for(address, 0.2)


def test_messages_to_a_node_travel_together_but_not_too_many() -> None:
    large = bytes(2**25 + 1)
    kept = [("1", b"a"), ("2", large), ("3", large), ("4", b"b")]
    assert [[name for name, _ in parcel] for parcel in _parcels(kept)] == [["1", "2"], ["3", "4"]]


@pytest.mark.parametrize(
    ("blob", "error", "answers"),
    [
        (join([b"x", b"y"]), "", [(b"x", ""), (b"y", "")]),
        (b"", "the node was lost", [(b"", "the node was lost")] * 2),
        (join([b"x"]), "", [(b"", "it gave 1 answers to 2 messages")] * 2),
        (b"???", "", [(b"", "3 bytes are no messages; both ends must run the same lit_fed")] * 2),
    ],
)
def test_every_message_of_a_parcel_is_answered(blob: bytes, error: str, answers: list[tuple[bytes, str]]) -> None:
    found = list(_opened(["1", "2"], blob, error))
    assert [reply.message_id for reply in found] == ["1", "2"]
    assert [(reply.blob, reply.error) for reply in found] == answers


def test_blobs_over_a_socket_arrive_whole_or_not_at_all() -> None:
    one, other = socket.socketpair()
    with one, other:
        send(one, b"", b"abc" * 1000)
        assert (receive(other, 5000), receive(other, 5000)) == (b"", b"abc" * 1000)
        send(one, b"abc")
        with pytest.raises(OSError, match="a message of 3 bytes is over the limit of 2"):
            receive(other, 2)
        one.sendall(b"\x09")
        one.close()
        with pytest.raises(OSError, match="the other end has gone"):
            receive(other, 5000)


@pytest.mark.parametrize(("keys", "known_by"), [(True, "ab12"), (False, "")])
def test_a_key_that_a_node_has_not_shown_to_be_its_own_proves_nothing(keys: bool, known_by: str) -> None:
    """Without authentication a SuperNode makes itself a key with every start."""
    one, stub = socket.socketpair()
    with one, stub:
        send(stub, json.dumps({"7": "ab12"}).encode())
        assert RelayGrid(one, [], limit=100, ttl=1, keys=keys).nodes() == {7: known_by}
        assert json.loads(receive(stub, 100)) == {"do": "nodes"}


class Ended:
    """A program that has ended while it was asked."""

    def check(self) -> None:
        raise ProcessLost("flower-superlink was killed by signal 9")


def test_a_superlink_that_is_gone_is_noticed_while_its_run_still_asks_for_it() -> None:
    """Flower's grid tries to reach it for ever, so that the stub never answers."""
    one, stub = socket.socketpair()
    with one, stub:
        with pytest.raises(ProcessLost, match="flower-superlink was killed by signal 9; go on with --ckpt_path last"):
            RelayGrid(one, [Ended()], limit=100, ttl=1, keys=False).nodes()  # type: ignore[list-item]  # has ended
        with pytest.raises(ProcessLost, match=r"the SuperLink has not answered for 0\.1 s; look whether it runs"):
            RelayGrid(one, [], limit=100, ttl=1, keys=False, silent_s=0.1).nodes()


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("exec sleep 60", "sh was killed by signal 9; what it said is in "),
        (
            r"printf '\033[91mERROR\033[0m: no key\n1\n'; exit 3",
            "sh ended with status 3: ERROR: no key 1; all",
        ),
        (
            r"printf 'ERROR: Exit Code: 305\nFailed to activate.\n\nSee elsewhere\nINFO: done\n'; exit 1",
            "sh ended with status 1: ERROR: Exit Code: 305 Failed to activate.; all",
        ),
        ("echo; echo All is well; echo 1; exit 4", "sh ended with status 4: All is well; all"),
    ],
)
def test_the_end_of_a_program_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, told: str
) -> None:
    monkeypatch.setattr("lit_fed.deployment.processes.program", lambda name: f"/bin/{name}")
    with running(["sh", "-c", does], tmp_path) as one:
        if "sleep" in does:
            one.check()
            one.process.kill()
        one.process.wait()
        with pytest.raises(ProcessLost, match=told):
            one.check()


def test_without_flwr_a_command_says_what_to_install(tmp_path: Path) -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        done = run_cli("node", "-c", ROOT / "configs/quickstart.yaml", "--client", "0", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == (
            "lit-fed: error: a federation over several machines needs flwr, which is not installed; "
            "pip install -c requirements/flower.txt 'lit-fed[flower]'\n"
        )


def test_a_blob_is_one_array_of_flowers() -> None:
    pytest.importorskip("flwr")
    from lit_fed.deployment.stub.blobs import pack, unpack

    for blob in (b"", b"abc", bytes(range(256)) * 100):
        assert unpack(pack(blob)) == blob


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--tls"]])
def test_over_flower_is_simulated_and_nothing_is_left_behind(options: list[str]) -> None:
    pytest.importorskip("flwr")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "federation.py"), "--rounds", "1", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
