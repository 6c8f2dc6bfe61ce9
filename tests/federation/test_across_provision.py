"""What `lit-fed provision` writes, keeps and refuses, and a federation of three sites by its page alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.command.cli import main
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.federation.commands.federation_file import read_federation
from lit_fed.federation.commands.provision import provision
from lit_fed.federation.keys import authority, node_keys
from lit_fed.federation.keys.authority import read_certificate, read_key, read_request
from lit_fed.federation.keys.node_keys import Grant, NodeKeys, key_of, read_hashes
from lit_fed.federation.transport.security import Security
from tests.support import ROOT

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY = timedelta(days=1)
SITES = {"north": {"clients": [0]}, "south": {"clients": [1]}, "west": {"clients": [2, 3]}}


def described(folder: Path, **changes: Any) -> Path:
    """A federation's file, and the configuration that it names."""
    quickstart = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    quickstart["data"]["init_args"]["num_clients"] = 4
    (folder / "run.yaml").write_text(yaml.safe_dump(quickstart))
    content = {
        "server": {"names": ["127.0.0.1", "localhost", "server.example.org"], "port": 9092},
        "config": "run.yaml",
        "sites": SITES,
    }
    path = folder / "federation.yaml"
    path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
    return path


def provisioned(
    folder: Path, *new_key: str, now: datetime = NOW, revoke: tuple[str, ...] = (), **changes: Any
) -> dict[str, str]:
    """Bring the folder up to date; what was said of every end."""
    lines = provision(read_federation(described(folder, **changes)), folder / "out", new_key, now, revoke)
    return {line.split()[0]: line for line in lines}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    provisioned(folder)
    return folder


@pytest.fixture
def ready(tmp_path: Path, once: Path) -> Path:
    """A folder that was provisioned, with its modes."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    """All files of all ends."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(folder: Path, before: dict[str, bytes]) -> set[str]:
    after = files(folder)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


# ---------------------------------------------------------------------- what is written


def test_every_end_gets_what_it_needs_and_no_other_ends_key(tmp_path: Path) -> None:
    provisioned(tmp_path)
    found = {path.as_posix() for path in map(Path, files(tmp_path / "out"))}
    shared = {"README.md", "config.yaml", "ca.crt"}
    own = {*shared, "node.key", "node.crt"}
    sites = {f"sites/{name}/{file}" for name in SITES for file in (*own, f"lit_fed-{name}.service")}
    keys = {f"server/keys/{name}.crt" for name in SITES}
    server = {f"server/{file}" for file in (*shared, "server.crt", "server.key", "node_keys.yaml", "revoked.txt")}
    assert found == {"authority/ca.key", "authority/ca.crt", "server/lit_fed-server.service"} | sites | keys | server


def test_private_keys_and_their_folders_are_their_owners_alone(tmp_path: Path) -> None:
    provisioned(tmp_path)
    out = tmp_path / "out"
    private = sorted(out.rglob("*.key"))
    assert len(private) == 5
    for path in private:
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700), path


def test_the_map_leads_from_each_sites_certificate_to_its_clients(tmp_path: Path) -> None:
    provisioned(tmp_path)
    server = tmp_path / "out" / "server"
    told = yaml.safe_load((server / "node_keys.yaml").read_text())
    assert told == {"keys/north.crt": [0], "keys/south.crt": [1], "keys/west.crt": [2, 3]}
    sites = {**SITES, "north": SITES["north"] | {"most_samples": 5000}}
    provisioned(tmp_path, sites=sites)
    assert bound(tmp_path)[key(tmp_path, "north")] == Grant(frozenset({0}), 5000, "north")
    assert bound(tmp_path)[key(tmp_path, "south")] == Grant(frozenset({1}), name="south")
    for name in SITES:
        site = tmp_path / "out" / "sites" / name
        assert read_key(site / "node.key").public_key() == read_certificate(site / "node.crt").public_key()
        assert (site / "node.crt").read_bytes() == (server / "keys" / f"{name}.crt").read_bytes()


def test_with_a_secure_sum_every_site_gets_the_list_of_all_keys(tmp_path: Path) -> None:
    file = described(tmp_path)
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    content["trainer"]["secure_sum"] = {"threshold": 3, "clip": 1.0}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    provision(read_federation(file), tmp_path / "out", (), NOW)
    for name in SITES:
        site = tmp_path / "out" / "sites" / name
        assert read_hashes(str(site / "peers.txt"), "--peers") == {key(tmp_path, other) for other in SITES}
        assert "--state_dir state --peers peers.txt\n" in (site / "README.md").read_text()


def bound(folder: Path) -> NodeKeys:
    """What the server makes of its files."""
    server = folder / "out" / "server"
    return NodeKeys(server / "node_keys.yaml", server / "revoked.txt")


def key(folder: Path, name: str = "north") -> str:
    return key_of((folder / "out" / "sites" / name / "node.crt").read_bytes())


def test_the_server_reads_what_it_was_given(ready: Path) -> None:
    assert dict(bound(ready)) == {
        key(ready, name): Grant(frozenset(told["clients"]), name=name) for name, told in SITES.items()
    }


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "server.example.org"])
def test_a_node_takes_the_server_by_each_of_its_names(tmp_path: Path, name: str) -> None:
    provisioned(tmp_path, now=datetime.now(UTC))
    server = tmp_path / "out" / "server"
    security = Security(*(str(server / file) for file in ("ca.crt", "server.crt", "server.key")))
    security.try_out(f"{name}:9092")
    site = tmp_path / "out" / "sites" / "north"
    Security(*(str(site / file) for file in ("ca.crt", "node.crt", "node.key"))).try_out()
    with pytest.raises(ConfigError, match=r"certificate is not valid for 'other\.example\.org'"):
        security.try_out("other.example.org:9092")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_openssl_takes_the_certificate_by_its_strictest_rules(tmp_path: Path) -> None:
    """As Python does by default from 3.13 on."""
    provisioned(tmp_path, now=datetime.now(UTC))
    ca, *ends = (str(tmp_path / "out" / "server" / name) for name in ("ca.crt", "server.crt", "keys/north.crt"))
    hosts = ["-verify_hostname", "server.example.org"]
    for certificate, words in zip(ends, (["-purpose", "sslserver", *hosts], ["-purpose", "sslclient"]), strict=True):
        command = ["openssl", "verify", "-x509_strict", *words, "-CAfile", ca, certificate]
        subprocess.run(command, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_units(ready: Path) -> None:
    units = sorted((ready / "out").rglob("*.service"))
    assert len(units) == 4
    for unit in units:
        readme = (unit.parent / "README.md").read_text()
        (started,) = re.findall(r"^ExecStart=/srv/lit_fed/venv/bin/(.*)$", unit.read_text(), re.MULTILINE)
        assert f"\n    {started}\n" in readme  # the same as by hand
        unit.write_text(unit.read_text().replace("/srv/lit_fed/venv/bin/lit-fed", shutil.which("true") or ""))
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("server", "told", "listening"),
    [
        ({"names": ["127.0.0.1", "a.example.org"]}, "127.0.0.1:9092", ""),
        ({"names": ["localhost"]}, "localhost:9092", ""),
        ({"names": ["::1"]}, "[::1]:9092", ""),
        ({"names": ["a.example.org", "192.0.2.7"]}, "a.example.org:9092", "--bind 0.0.0.0:9092 "),  # maybe behind NAT
        ({"names": ["2001:db8::0:7"]}, "[2001:db8::7]:9092", "--bind [::]:9092 "),
        ({"names": ["A.example.org"], "listen": "10.0.0.7"}, "a.example.org:9092", "--bind 10.0.0.7:9092 "),
    ],
)
def test_nodes_are_told_the_first_name_and_the_server_where_to_listen(
    tmp_path: Path, server: dict[str, Any], told: str, listening: str
) -> None:
    provisioned(tmp_path, server=server | {"port": 9092})
    out = tmp_path / "out"
    assert f"--server {told} --ca" in (out / "sites" / "north" / "README.md").read_text()
    assert f"--server {told} {listening}--ca" in (out / "server" / "README.md").read_text()


def test_an_ends_own_settings_of_the_data_are_in_its_configuration_only(tmp_path: Path) -> None:
    file = described(tmp_path, sites=SITES | {"north": {"clients": [0], "data": {"root": "/data/of north: 1"}}})
    arrays = {"num_clients": 4, "stored_shape": [1, 8, 8], "num_classes": 10}
    more = {"data": {"class_path": "ClientArrays", "init_args": arrays}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load((tmp_path / "run.yaml").read_text()) | more))
    provision(read_federation(file), tmp_path / "out", (), NOW)
    texts = [tmp_path / "out" / name / "config.yaml" for name in ("sites/north", "sites/south", "server")]
    one, other, server = (yaml.safe_load(path.read_text()) for path in texts)
    assert other == server
    assert (one["data"]["init_args"].pop("root"), other["data"]["init_args"].pop("root")) == (
        "/data/of north: 1",
        "data",
    )
    assert one == other


# ---------------------------------------------------------------------- what is kept


def test_called_again_it_changes_nothing(tmp_path: Path) -> None:
    provisioned(tmp_path)
    before = files(tmp_path / "out")
    said = provisioned(tmp_path)
    assert not changed(tmp_path / "out", before)
    assert said["server"] == ("server      key kept, certificate kept until 2027-03-01; its other files are unchanged")
    assert said["north"] == said["server"].replace("server", "north ")


def test_how_many_clients_there_are_stands_in_the_configuration(tmp_path: Path) -> None:
    """What the data would say is not asked: theirs are at the sites."""
    file = described(tmp_path)
    config = yaml.safe_load((tmp_path / "run.yaml").read_text())
    del config["data"]["init_args"]["num_clients"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"num_clients is not set in .*run\.yaml; set the number of clients"):
        provision(read_federation(file), tmp_path / "out", (), NOW)


def test_a_new_site_leaves_the_others_alone(tmp_path: Path) -> None:
    sites = SITES | {"west": {"clients": [2]}}
    described(tmp_path)
    provisioned(tmp_path, sites=SITES | {"west": {"clients": [2, 3]}})
    before = files(tmp_path / "out")
    provisioned(tmp_path, sites=sites | {"east": {"clients": [3]}})
    new = changed(tmp_path / "out", before)
    own = ("README.md", "config.yaml", "ca.crt", "node.key", "node.crt", "lit_fed-east.service")
    east = {f"sites/east/{file}" for file in own}
    west = {"sites/west/README.md", "sites/west/lit_fed-west.service"}  # which named client 3, too
    assert new == east | west | {"server/keys/east.crt", "server/node_keys.yaml"}


def test_a_lost_key_is_made_anew_on_request_and_no_other(ready: Path) -> None:
    before = files(ready / "out")
    said = provisioned(ready, "north")
    own = {"sites/north/node.key", "sites/north/node.crt", "server/keys/north.crt"}
    assert changed(ready / "out", before) == own | {"server/revoked.txt"}
    assert said["north"] == "north       new key, new certificate until 2027-03-01; written: node.crt"
    before = files(ready / "out")
    provisioned(ready, "server")
    assert changed(ready / "out", before) == {"server/server.key", "server/server.crt"}


def test_a_key_that_was_replaced_or_revoked_opens_nothing(ready: Path) -> None:
    old = key(ready)
    assert bound(ready)[old].clients == {0}
    provisioned(ready, "north")
    new = key(ready)
    assert old not in bound(ready)
    assert bound(ready)[new].clients == {0}
    (said,) = provisioned(ready, revoke=("north",)).values()
    assert said == f"north       its key is revoked; copy {ready}/out/server/revoked.txt to the server"
    for _ in range(2):  # it stays so
        assert new not in bound(ready)
        said = provisioned(ready, now=NOW + 360 * DAY)
    assert said["north"].startswith("north       its key is revoked; replace it with --new_key north; ")
    listed = (ready / "out" / "server" / "revoked.txt").read_text().splitlines()
    assert listed == [listed[0], f"{old}  # north, 2026-03-01", f"{new}  # north, 2026-03-01"]
    provisioned(ready, "north")
    assert bound(ready)[key(ready)].clients == {0}


@pytest.mark.parametrize(
    ("days", "renewed"), [(334, False), (336, True), (400, True)]
)  # of 365, renewed in the last 30
def test_a_certificate_near_its_end_is_renewed_under_the_same_key_and_authority(
    ready: Path, days: int, renewed: bool
) -> None:
    before = files(ready / "out")
    said = provisioned(ready, now=NOW + days * DAY)
    certificates = {f"sites/{name}/node.crt" for name in SITES} | {f"server/keys/{name}.crt" for name in SITES}
    assert changed(ready / "out", before) == (certificates | {"server/server.crt"} if renewed else set())
    for name in ("server", "north"):
        assert ("the old one ends on 2027-03-01" in said[name]) is renewed
    assert set(bound(ready).values()) == {
        Grant(frozenset(told["clients"]), name=name) for name, told in SITES.items()
    }  # none is revoked


def test_another_name_of_the_server_is_another_certificate(ready: Path) -> None:
    before = files(ready / "out")
    said = provisioned(ready, server={"names": ["127.0.0.1", "localhost"], "port": 9092})
    assert changed(ready / "out", before) == {"server/server.crt"}
    assert "new certificate until 2027-03-01: the old one was for 127.0.0.1, localhost, server." in said["server"]


def test_an_authority_in_its_last_year_is_renewed_under_its_key_so_that_nodes_go_on(ready: Path) -> None:
    old = read_certificate(ready / "out" / "authority" / "ca.crt")
    later = NOW + 3652 * DAY - 364 * DAY
    provisioned(ready, now=later)
    ca, server = (read_certificate(ready / "out" / "server" / name) for name in ("ca.crt", "server.crt"))
    assert ca.not_valid_after_utc == later + 3652 * DAY
    for one in (old, ca):  # a node that has either believes the server
        server.verify_directly_issued_by(one)


def test_keys_that_were_moved_to_where_they_are_used_are_not_missed(ready: Path) -> None:
    out = ready / "out"
    shutil.rmtree(out / "sites" / "north")
    (out / "server" / "server.key").unlink()
    shutil.move(out / "authority" / "ca.key", ready / "ca.key")
    before = files(out)
    said = provisioned(ready)
    assert not (out / "sites" / "north" / "node.key").exists()
    assert not changed(out, before) - {f"sites/north/{n}" for n in files(out / "sites" / "north")}
    assert "key kept (it is not in this folder)" in said["north"]
    other = {"names": ["192.0.2.7"], "port": 9092}
    with pytest.raises(
        ConfigError, match=r"authority/ca\.key does not exist, and signing a certificate needs it; restore"
    ):
        provisioned(ready, server=other)
    shutil.move(ready / "ca.key", out / "authority" / "ca.key")
    key = read_certificate(out / "server" / "server.crt").public_key()
    provisioned(ready, server=other)
    assert read_certificate(out / "server" / "server.crt").public_key() == key


PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_a_site_makes_its_key_itself_and_no_private_key_travels(tmp_path: Path) -> None:
    """By the command of the page; a second request replaces, and revokes, the key of the first."""
    (command,) = re.findall(r"^(openssl req -new .*)$", PAGE, re.MULTILINE)
    north, seen = tmp_path / "out" / "sites" / "north", []
    for _ in range(2):
        (tmp_path / "north").mkdir(exist_ok=True)
        subprocess.run(["bash", "-ec", command], cwd=tmp_path / "north", check=True, capture_output=True)
        assert (tmp_path / "north" / "node.key").stat().st_mode & 0o777 == 0o600
        north.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "north" / "node.csr", north)
        said = provisioned(tmp_path, now=datetime.now(UTC))
        assert said["north"].startswith("north       key of its request, new certificate until ")
        assert not (north / "node.key").exists()
        shutil.copy(north / "node.crt", tmp_path / "north")
        shutil.copy(north / "ca.crt", tmp_path / "north")
        site = tmp_path / "north"
        Security(*(str(site / file) for file in ("ca.crt", "node.crt", "node.key"))).try_out()
        seen.append(key(tmp_path))
    assert bound(tmp_path).get(seen[0]) is None
    assert bound(tmp_path)[seen[1]].clients == {0}
    with pytest.raises(ConfigError, match=r"--new_key north replaces .*node.csr, and the key is elsewhere"):
        provisioned(tmp_path, "north")
    shutil.copy(tmp_path / "out" / "sites" / "south" / "node.key", north)
    with pytest.raises(ConfigError, match=r"node.key and .*node.csr do not match; remove the one that is not in use"):
        provisioned(tmp_path)


# ---------------------------------------------------------------------- operators


def roles(folder: Path) -> tuple[list[str], list[str]]:
    """Whom the server takes for operators, and for nodes."""
    found = bound(folder)
    return sorted(found.operators.values()), sorted(grant.name for grant in found.data.values())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_an_operator_gets_a_folder_and_a_certificate_that_says_so(tmp_path: Path) -> None:
    said = provisioned(tmp_path, operators=["anna"], now=datetime.now(UTC))
    home = tmp_path / "out" / "operators" / "anna"
    assert {path.name for path in home.iterdir()} == {"README.md", "ca.crt", "operator.crt", "operator.key"}
    assert ((home / "operator.key").stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o600, 0o700)
    assert said["anna"].startswith("anna        new key, new certificate until ")
    assert roles(tmp_path) == (["anna"], [*SITES])
    words = ["openssl", "x509", "-noout", "-ext", "extendedKeyUsage", "-in", str(home / "operator.crt")]
    shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert f"TLS Web Client Authentication, {node_keys.OPERATOR_USE}" in shown
    before = files(tmp_path / "out")
    provisioned(tmp_path, operators=["anna"], now=datetime.now(UTC))
    assert not changed(tmp_path / "out", before)


def test_an_operator_is_revoked_replaced_and_removed_as_a_site(ready: Path) -> None:
    provisioned(ready, operators=["anna"])
    (said,) = provisioned(ready, operators=["anna"], revoke=("anna",)).values()
    assert said.startswith("anna        its key is revoked; copy ")
    assert roles(ready)[0] == []
    provisioned(ready, "anna", operators=["anna"])
    assert roles(ready)[0] == ["anna"]
    said = provisioned(ready)["anna"]
    assert said.startswith("anna        is no longer an end, and its key is not accepted; remove ")
    assert roles(ready) == ([], [*SITES])


def test_a_request_does_not_choose_its_role_and_a_key_does_not_change_it(ready: Path) -> None:
    """North asks for an operator's certificate and gets a node's; as an operator north has another key."""
    made = authority.new_key()
    uses = x509.ExtendedKeyUsage([x509.ObjectIdentifier(node_keys.OPERATOR_USE)])
    asked = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).add_extension(uses, critical=False)
    (ready / "out/sites/north/node.key").unlink()
    (ready / "out/sites/north/node.csr").write_bytes(asked.sign(made, hashes.SHA384()).public_bytes(Encoding.PEM))
    provisioned(ready)
    certificate = (ready / "out/sites/north/node.crt").read_bytes()
    assert read_certificate(ready / "out/sites/north/node.crt").public_key() == made.public_key()
    assert not node_keys.is_operator(certificate)
    sites = {"south": {"clients": [0, 1]}, "west": {"clients": [2, 3]}}
    provisioned(ready, sites=sites, operators=["north"])
    found = bound(ready)
    assert roles(ready) == (["north"], ["south", "west"])
    assert key_of(certificate) in found.barred
    assert key_of(certificate) not in found.operators


@pytest.mark.parametrize(
    ("operators", "told"),
    [
        ("anna", "operators is 'anna'; it must be a list of names"),
        ([], "operators is []; it must be a list of names"),
        (["../anna"], "operators: '../anna' has an invalid name; write up to 63 of A-Z"),
        ([3], "operators: 3 has an invalid name"),
        (["Server"], "operators: Server has the server's name; choose another name"),
        (["North"], "operators has North, which is taken by a site or another operator; choose another name"),
        (["anna", "Anna"], "operators has Anna, which is taken by a site or another operator"),
    ],
)
def test_names_of_operators_are_as_those_of_sites_and_differ_from_them(
    tmp_path: Path, operators: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_federation(described(tmp_path, operators=operators))


def test_a_site_that_is_gone_opens_nothing(ready: Path) -> None:
    said = provisioned(ready, sites={"north": {"clients": [0, 1]}, "west": {"clients": [2, 3]}})
    assert said["south"].startswith("south       is no longer an end, and its key is not accepted; remove ")
    assert "south" not in (ready / "out" / "server" / "node_keys.yaml").read_text()


@pytest.mark.parametrize("writes", range(0, 28, 3))  # of 31
def test_killed_at_any_file_and_called_again_it_is_whole_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    whole, left = authority.write, iter(range(writes))

    def until_killed(path: Path, content: bytes, mode: int = 0o644) -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return whole(path, content, mode)

    with monkeypatch.context() as patched:
        patched.setattr(authority, "write", until_killed)
        with pytest.raises(KeyboardInterrupt):
            provisioned(tmp_path)
    before = files(tmp_path / "out")
    dead = subprocess.Popen(["true"])
    dead.wait()
    half = tmp_path / "out" / "authority" / f".ca.key.{dead.pid}.tmp"
    half.parent.mkdir(parents=True, exist_ok=True)
    half.write_text("-----BEGIN PRIVATE KEY-----\n")
    provisioned(tmp_path)
    assert not half.exists()
    assert not changed(tmp_path / "out", before) & before.keys()
    test_the_map_leads_from_each_sites_certificate_to_its_clients(tmp_path)


# ---------------------------------------------------------------------- what is refused


def test_halves_of_different_keys_of_an_authority_are_refused(ready: Path) -> None:
    (ready / "out" / "authority" / "ca.key").write_bytes((ready / "out" / "server" / "server.key").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.key and .*ca\.crt do not match; restore the original files"):
        provisioned(ready)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("authority/ca.key", "ca.key is not a private key; restore the original file"),
        ("authority/ca.crt", "ca.crt is not a certificate; restore the file, or remove it to get a new one"),
        ("server/server.key", "server.key is not a private key"),
        ("server/server.crt", "server.crt is not a certificate"),
        ("server/keys/north.crt", "north.crt is not a certificate"),
        ("sites/north/node.csr", "node.csr is not a certificate signing request; make one with openssl req -new"),
        ("sites/north/node.key", "node.key is not a private key"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"nothing", b"-----BEGIN PRIVATE KEY-----\nAAAA\n", b"\xff\x00" * 99])
def test_a_damaged_file_is_named_and_not_written_over(ready: Path, path: str, told: str, content: bytes) -> None:
    (ready / "out" / path).write_bytes(content)
    (ready / "out" / "server" / "keys" / "south.crt").unlink()  # which would be written again
    before = files(ready / "out")
    with pytest.raises(ConfigError, match=re.escape(told)):
        provisioned(ready)
    assert not changed(ready / "out", before)


@pytest.mark.parametrize(
    "path", ["authority/ca.key", "server/server.key", "server/keys/north.crt", "sites/north/node.key"]
)
def test_a_key_on_a_disk_that_is_not_there_is_no_reason_for_another(tmp_path: Path, path: str) -> None:
    link = tmp_path / "out" / path
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "stick" / link.name)
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        provisioned(tmp_path)
    assert link.is_symlink()
    assert not files(tmp_path / "out")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    own, request = tmp_path / "own", tmp_path / "own.csr"
    curve = ["-algorithm", "EC", "-pkeyopt"]
    for words, told in (
        (["-algorithm", "ED25519"], "is not for an ECDSA key on P-384; make one with openssl genpkey"),
        ([*curve, "ec_paramgen_curve:P-256"], "is not for an ECDSA key on P-384"),
        ([*curve, "ec_paramgen_curve:P-384", "-aes256", "-pass", "pass:secret"], "has a passphrase; give or remove it"),
    ):
        subprocess.run(["openssl", "genpkey", *words, "-out", own], check=True, capture_output=True)
        with pytest.raises(ConfigError, match=told):
            read_key(own)
        if "passphrase" not in told:
            words = ["openssl", "req", "-new", "-key", str(own), "-subj", "/CN=x", "-out", str(request)]
            subprocess.run(words, check=True, capture_output=True)
            with pytest.raises(ConfigError, match=told):
                read_request(request)


def test_a_key_that_others_can_read_is_closed_to_them(ready: Path) -> None:
    path = ready / "out" / "sites" / "north" / "node.key"
    path.chmod(0o644)
    assert "others could read it; now only its owner can" in provisioned(ready)["north"]
    assert path.stat().st_mode & 0o777 == 0o600


def server(**changes: Any) -> dict[str, Any]:
    return {"server": {"names": ["127.0.0.1"], "port": 9092} | changes}


def site(name: Any = "north", **changes: Any) -> dict[str, Any]:
    return {"sites": {name: {"clients": [0]} | changes}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"site": {}}, "unknown key 'site'; did you mean sites?"),
        ({"trainer": {}}, "unknown key 'trainer'; there are server, config, sites"),
        ({"sites": None}, "sites is missing"),
        ({"sites": []}, r"sites is \[\]; it must be a mapping"),
        ({"sites": {}}, r"sites is {}; it must be a mapping"),
        ({"server": "127.0.0.1:9092"}, "server is '127.0.0.1:9092'; it must be a mapping"),
        ({"server": {"names": ["a"]}}, "server: port is missing"),
        (server(host="a"), "server: unknown key 'host'; there are names, port, listen, data"),
        (server(port=0), "server.port is 0; it must be a whole number from 1 to 65535"),
        (server(port=65536), "server.port is 65536"),
        (server(port=True), "server.port is True"),
        (server(port="9092"), "server.port is '9092'"),
        (server(listen="here"), "server.listen is 'here'; it must be an address of the server's machine"),
        (server(listen=7), "server.listen is 7"),
        (server(names="127.0.0.1"), "server.names is '127.0.0.1'; it must be a list of host names and addresses"),
        (server(names=[]), r"server.names is \[\]"),
        (server(names=[7]), "server.names: 7 is not text"),
        (server(names=["127.0.0.1:9092"]), "'127.0.0.1:9092' is neither a host name nor an address"),
        (server(names=["https://a"]), "'https://a' is neither"),
        (server(names=["*.example.org"]), r"'\*.example.org' is neither"),
        (server(names=["a..b"]), "'a..b' is neither"),
        (server(names=["-a"]), "'-a' is neither"),
        (server(names=["a.b "]), "'a.b ' is neither"),
        (server(names=["a\nb"]), r"'a\\nb' is neither"),
        (server(names=["a\n"]), r"'a\\n' is neither"),
        (server(names=["müller.example.org"]), "'müller.example.org' is neither"),
        (server(names=["192.0.2.256"]), "'192.0.2.256' is neither"),
        (server(names=["a" * 64]), "is neither"),
        (server(names=["0.0.0.0"]), "'0.0.0.0' is not an address at which nodes can reach a server"),
        (server(names=["::"]), "'::' is not an address"),
        (server(names=["fe80::1%eth0"]), "'fe80::1%eth0' is not an address"),
        (server(names=["A.example.org", "a.example.org"]), "has a.example.org twice; remove one"),
        (server(data={"seed": 3}), "server: data.seed must be the same everywhere; write it in the run's conf"),
        (server(data={"root": [1]}), r"data.root is \[1\]; it must be a text"),
        ({"config": []}, r"config is \[\]; it must be a file, or a list of files"),
        ({"config": [1]}, r"config is \[1\]"),
        ({"config": "other.yaml"}, "config file .*other.yaml does not exist"),
        ({"config": "federation.yaml"}, "loop detected: .*federation.yaml"),
        (site("../north"), "site '../north' has an invalid name; write up to 63 of"),
        (site(".."), "site '..' has an invalid name"),
        (site("a/b"), "site 'a/b' has an invalid name"),
        (site("a b"), "site 'a b' has an invalid name"),
        (site("%i"), "site '%i' has an invalid name"),
        (site("-c"), "site '-c' has an invalid name"),
        (site("a\n"), r"site 'a\\n' has an invalid name"),
        (site(""), "site '' has an invalid name"),
        (site(1), "site 1 has an invalid name"),
        (site(False), "site False has an invalid name"),
        (site("Server"), "site Server has the server's name"),
        (site(clients=[]), r"site north: clients is \[\]; it must be a list of client ids, from 0"),
        (site(clients=0), "site north: clients is 0"),
        (site(clients=[-1]), r"site north: clients is \[-1\]"),
        (site(clients=[True]), r"site north: clients is \[True\]"),
        (site(clients=["0"]), r"site north: clients is \['0'\]"),
        (site(most_samples=0), "site north: most_samples is 0; it must be a whole number from 1"),
        (site(most_samples="many"), "site north: most_samples is 'many'"),
        (site(clients=[1, 1]), "site north has client 1 twice; remove one"),
        (site(clients=[4]), "site north has client 4; data.num_clients is 4"),
        (site(clients=[0]), "client 1 and 2 others have no site; data.num_clients is 4"),
        (site(clients=[0, 1, 2]), "client 3 has no site"),
        (site(key="k"), "site north: unknown key 'key'; there are clients, data"),
        (site(clients=[0, 1, 2, 3], data={"num_workers": 1}), "data.num_workers of north is not a setting of lit_fed"),
        (site(data={"num_workers": True}), "site north: data.num_workers is True; it must be a whole number"),
        (site(data={"nowhere": 1}), "site north: data.nowhere must be the same everywhere"),
        ({"sites": {"a": {"clients": [0, 1]}, "b": {"clients": [1]}}}, "client 1 is at both a and b; remove one"),
        ({"sites": {"a": {"clients": [0]}, "A": {"clients": [1]}}}, "sites a and A differ by case only"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_refused_in_a_line_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["provision", "-c", str(described(tmp_path, **changes)), "--output", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert re.search(told, said)
    assert not (tmp_path / "out").exists()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.mktemp("odd") / "federation.yaml"
    content: dict[Any, Any] = {**server(), "config": "run.yaml", **site()}
    place: Any = content
    for key in data.draw(st.sampled_from([(), ("server",), ("sites",), ("sites", "north"), ("server", "names")])):
        place = place[key]
    if isinstance(place, dict):
        key = data.draw(st.sampled_from([*place]) | st.text())
        place[key] = data.draw(ANYTHING)
    else:
        place.append(data.draw(ANYTHING))
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    with suppress(ConfigError):
        found = read_federation(path)
        assert all(re.fullmatch(r"[A-Za-z0-9][\w-]*", one.name, re.ASCII) for one in found.sites)
        assert not re.search(r"[^A-Za-z0-9.:\[\]-]", found.address)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(
        ConfigError, match=r"out holds thesis\.tex, which is not part of a federation; name a new folder"
    ):
        provisioned(tmp_path)
    (tmp_path / "out" / "thesis.tex").unlink()
    with pytest.raises(ConfigError, match=r"is not an end in .*; did you mean north\?"):
        provisioned(tmp_path, "nort")
    with pytest.raises(ConfigError, match="--revoke server is not an end in"):
        provisioned(tmp_path, revoke=("server",))
    with pytest.raises(ConfigError, match=r"--revoke north has no certificate in .*; run the command without it first"):
        provisioned(tmp_path, revoke=("north",))
    with pytest.raises(ConfigError, match=r"federation\.yaml is not a folder"):
        provision(read_federation(described(tmp_path)), tmp_path / "federation.yaml", (), NOW)


def test_a_stolen_key_is_revoked_whatever_else_is_wrong(ready: Path) -> None:
    """In a folder with notes, with a configuration and a site's request that nobody can read, and without authority."""
    out, stolen = ready / "out", key(ready)
    path = described(ready)
    (out / "notes.txt").write_text("who rang, and when")
    (out / "sites" / "south" / "node.csr").write_text("a draft")
    shutil.move(out / "authority", ready / "authority")
    (ready / "run.yaml").write_text("data: {class_path: Nowhere}\n")
    revoked, other = out / "server" / "revoked.txt", key(ready, "west")
    revoked.write_text(f"# {stolen}\n{other}  # west, by hand")  # in a comment it is not revoked; no end of the line
    before = files(out)
    for _ in range(2):
        provision(read_federation(path), out, (), NOW, ("north",))
        assert changed(out, before) == {"server/revoked.txt"}
        assert read_hashes(revoked, "--revoked") == {stolen, other}
    assert revoked.read_text().splitlines()[2:] == [f"{stolen}  # north, 2026-03-01"]
    assert stolen not in bound(ready)
    revoked.write_text("half a line\n")
    with pytest.raises(ConfigError, match=r"--revoked .*revoked.txt has 'half a line'; write the SHA-256 of a public"):
        provision(read_federation(path), out, (), NOW, ("north",))
    (out / "server" / "keys" / "north.crt").write_text("half a file")
    with pytest.raises(ConfigError, match=r"north.crt is not a certificate; restore the file"):
        provision(read_federation(path), out, (), NOW, ("north",))


@pytest.mark.parametrize("new_key", [(), ("north",)])
def test_notes_in_a_folder_of_a_federation_stop_nothing(ready: Path, new_key: tuple[str, ...]) -> None:
    (ready / "out" / "notes.txt").write_text("who rang, and when")
    assert "revoked" not in provisioned(ready, *new_key)["north"]
    assert (ready / "out" / "notes.txt").read_text() == "who rang, and when"


def test_a_folder_that_cannot_be_written_is_told(ready: Path) -> None:
    (ready / "out" / "sites" / "north" / "README.md").unlink()
    (ready / "out" / "sites" / "north" / "README.md").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*README\.md: .*directory"):
        provisioned(ready)
