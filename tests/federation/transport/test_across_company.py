"""Ends with certificates of a company's authority over sockets: chains, passphrases, renewal and revocation."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificate

from lit_fed.errors import ConfigError
from lit_fed.federation.keys import node_keys
from lit_fed.federation.keys.node_keys import NodeKeys, key_of
from lit_fed.federation.transport.serving import RpcGrid, rpc_grid
from tests.federation.company import Company
from tests.federation.serving_support import Echo, answer_of, free_address, until, working


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Company:
    monkeypatch.setattr(node_keys, "_LOOK_S", 0.0)
    made = Company(tmp_path)
    made.issue("server", "of server")
    made.issue("node", "of node")
    (tmp_path / "node_keys.yaml").write_text("node.crt: [0]\n")
    return made


@contextmanager
def served(
    company: Company, address: str, said: list[str], crl: bool = False, ca: str = "root", word: bytes = b"of server"
) -> Iterator[RpcGrid]:
    lists = (company.folder / "crl", company.folder / "both.crt") if crl else None
    keys = NodeKeys(company.folder / "node_keys.yaml", None, said.append, lists)
    with rpc_grid(address, company.security("server", ca, word), 2**20, None, keys) as grid:
        yield grid


def known(company: Company, name: str = "node") -> str:
    return key_of((company.folder / f"{name}.crt").read_bytes())


@pytest.mark.parametrize(("ca", "chain"), [("root", True), ("both", False)])
def test_ends_of_a_company_find_each_other(company: Company, ca: str, chain: bool) -> None:
    """The intermediate authority's certificate is behind each end's own, or in ``--ca``."""
    for name in ("server", "node"):
        company.issue(name, f"of {name}", chain=chain)
    address, node = free_address(), Echo()
    security = company.security("node", ca, b"of node")
    security.try_out()
    with served(company, address, [], ca=ca) as grid, working(node, address, security):
        security.greet(address)
        (found,) = until(grid.nodes)
        assert grid.nodes() == {found: known(company)}
        assert answer_of(grid, found, b"hello").blob == b"hello"


def test_a_chain_that_lacks_the_intermediate_authority_is_refused_before_the_start(company: Company) -> None:
    company.issue("server", "of server", chain=False)
    with pytest.raises(ConfigError, match=r"that trusts --ca .*root.crt will reject .*local issuer certificate"):
        company.security("server", "root", b"of server").try_out("127.0.0.1:1")


def test_a_passphrase_that_does_not_fit_is_told(company: Company) -> None:
    for word, expected in ((b"of node", "the passphrase does not open .*server.key"), (None, "or give the key's pass")):
        security = company.security("server", passphrase=word)
        with pytest.raises(ConfigError, match=expected), rpc_grid("127.0.0.1:1", security, 1, None, {}):  # type: ignore[arg-type]
            pytest.fail("it listens")
        assert "of node" not in repr(security)


def seen_certificate(company: Company, address: str) -> bytes:
    """The server's certificate in DER, as a new connection sees it."""
    context = ssl.create_default_context(cafile=str(company.folder / "root.crt"))
    host, port = address.split(":")
    line = socket.create_connection((host, int(port)), timeout=10)
    with line, context.wrap_socket(line, server_hostname=host) as wrapped:
        return wrapped.getpeercert(binary_form=True) or b""


def test_a_server_shows_its_renewed_certificate_to_new_connections_alone(company: Company) -> None:
    address, node, said = free_address(), Echo(), list[str]()
    security = company.security("node", passphrase=b"of node")
    with served(company, address, said) as grid, working(node, address, security):
        (found,) = until(grid.nodes)
        before = seen_certificate(company, address)
        assert seen_certificate(company, address) == before
        key = (company.folder / "server.key").read_bytes()
        company.issue("server", "of server")
        new, own = (company.folder / "server.key").read_bytes(), (company.folder / "server.crt").read_bytes()
        (company.folder / "server.key").write_bytes(key)  # a half-copied pair: the new certificate, the old key
        assert seen_certificate(company, address) == before
        (line,) = said
        assert "server.key do not match (key values mismatch)" in line
        assert line.endswith("; until then the certificate and the key stay as they were")
        (company.folder / "server.key").write_bytes(new)
        assert seen_certificate(company, address) == load_pem_x509_certificate(own).public_bytes(Encoding.DER)
        assert said[1:] == [f"read {company.folder}/server.crt again, for new connections"]
        assert grid.nodes() == {found: known(company)}
        assert answer_of(grid, found, b"hello").blob == b"hello"
    assert [line for line in node.said if "answers again" in line or "lost" in line] == []


def test_a_node_uses_its_renewed_certificate_for_its_next_stream(company: Company) -> None:
    """Under its key: the server's list of keys stays as it is; the certificate before has been revoked meanwhile."""
    address, node, said = free_address(), Echo(), list[str]()
    (company.folder / "crl").write_bytes(company.revoke([]))
    key = company.issue("node", "of node")
    security = company.security("node", passphrase=b"of node")
    with served(company, address, said, crl=True) as grid, working(node, address, security) as line:
        (found,) = until(grid.nodes)
        channel, old = line._channel, (company.folder / "node.crt").read_bytes()
        company.issue("node", "of node", key=key)
        assert answer_of(grid, found, b"hello").blob == b"hello"
        assert line._channel is channel
        new = (company.folder / "node.crt").read_bytes()
        (company.folder / "node.crt").write_bytes(old)
        content = company.revoke(["node"])
        (company.folder / "node.crt").write_bytes(new)
        (company.folder / "crl").write_bytes(content)
        until(lambda: grid.nodes() and line._channel is not channel)
        (again,) = until(grid.nodes)
        assert answer_of(grid, again, b"hello").blob == b"hello"
        assert grid.nodes() == {again: known(company)}
    assert f"read {company.folder}/node.crt again, for new connections" in node.said


def test_a_revoked_certificate_loses_its_stream_and_opens_no_other(company: Company) -> None:
    address, node, said = free_address(), Echo(), list[str]()
    (company.folder / "crl").write_bytes(company.revoke([]))
    security = company.security("node", passphrase=b"of node")
    with served(company, address, said, crl=True) as grid, working(node, address, security):
        until(grid.nodes)
        (company.folder / "crl").write_bytes(company.revoke(["node"]))
        until(lambda: not grid.nodes())
        until(lambda: any("certificate is revoked; get another one from the authority" in line for line in node.said))
        assert grid.nodes() == {}


def test_without_a_valid_list_no_stream_is_opened(company: Company) -> None:
    """A list that is not valid yet stands for one that has ended: at a start the latter is refused at once."""
    address, node, said = free_address(), Echo(), list[str]()
    (company.folder / "crl").write_bytes(company.revoke([], begin=timedelta(hours=1)))
    security = company.security("node", passphrase=b"of node")
    with served(company, address, said, crl=True) as grid, working(node, address, security):
        until(lambda: any("has no valid list of revoked certificates" in line for line in node.said))
        assert grid.nodes() == {}
        (company.folder / "crl").write_bytes(company.revoke([]))
        until(grid.nodes)
