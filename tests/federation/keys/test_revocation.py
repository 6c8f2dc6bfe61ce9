"""Which lists of revoked certificates count."""

from __future__ import annotations

import subprocess
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from lit_fed.errors import ConfigError
from lit_fed.federation.keys import node_keys, revocation
from lit_fed.federation.keys.node_keys import NodeKeys
from lit_fed.federation.keys.revocation import RevocationLists
from tests.federation.company import DAY, Company


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Company:
    made = Company(tmp_path_factory.mktemp("company"))
    for name in ("north", "south"):
        made.issue(name)
    return made


def lists(company: Company, content: bytes, ca: str = "both") -> RevocationLists:
    path = company.folder / "list"
    path.write_bytes(content)
    return RevocationLists(path, company.folder / f"{ca}.crt")


def test_a_list_says_what_openssl_says(company: Company) -> None:
    """In DER, in PEM, and beside another authority's list."""
    pem = company.revoke(["north"])
    (company.folder / "pem").write_bytes(pem)
    for content in (pem, company.revoke(["north"], encoding=Encoding.DER), company.revoke([], by="root") + pem):
        found = lists(company, content)
        for name, word in (("north", "certificate revoked"), ("south", "OK")):
            words = ["openssl", "verify", "-crl_check", "-CAfile", "both.crt", "-CRLfile", "pem", f"{name}.crt"]
            done = subprocess.run(words, cwd=company.folder, capture_output=True, text=True, check=False)
            assert word in done.stdout + done.stderr
            certificate = (company.folder / f"{name}.crt").read_bytes()
            assert found.has(certificate) is (word != "OK")
            assert found.cover(certificate)


def test_a_certificate_of_an_authority_without_a_list_is_not_covered(company: Company) -> None:
    found = lists(company, company.revoke([], by="root"))
    assert not found.cover((company.folder / "south.crt").read_bytes())
    early = lists(company, company.revoke([], begin=timedelta(hours=1)))
    assert not early.cover((company.folder / "south.crt").read_bytes())  # not yet


@pytest.mark.parametrize(
    ("changes", "ca", "expected"),
    [
        ({"end": -timedelta(hours=1)}, "both", r"the list of CN=intermediate ended on 20.* UTC; fetch a new one"),
        ({"key": ec.generate_private_key(ec.SECP256R1())}, "both", "is not signed by an authority of .*both.crt; add"),
        ({}, "root", "the list of CN=intermediate is not signed by an authority of .*root.crt; add the authority's"),
        ({"partial": True}, "both", "is a part of a list; give the whole list"),
    ],
)
def test_a_list_that_does_not_count_is_refused(
    company: Company, changes: dict[str, Any], ca: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as told:
        lists(company, company.revoke(["north"], **changes), ca)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("content", [b"", b"nothing", b"-----BEGIN X509 CRL-----\nAA\n-----END X509 CRL-----\n"])
def test_what_is_no_list_is_refused(company: Company, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"list is not a readable list of revoked certificates \(ValueError\); corr"):
        lists(company, content)


def test_two_lists_of_an_authority_are_refused(company: Company) -> None:
    with pytest.raises(ConfigError, match="list has two lists of CN=intermediate; keep the newer"):
        lists(company, company.revoke([]) + company.revoke(["north"]))


def test_a_list_is_read_again_and_its_end_is_said_once(
    company: Company, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_keys, "_LOOK_S", 0.0)
    (tmp_path / "keys.yaml").write_text(f"{company.folder}/north.crt: [0]\n")
    path, said = tmp_path / "crl", list[str]()
    path.write_bytes(company.revoke([]))
    found = NodeKeys(tmp_path / "keys.yaml", None, said.append, (path, company.folder / "both.crt"))
    (key,), north = found, (company.folder / "north.crt").read_bytes()
    assert found.objection(key, north) == ""
    path.write_bytes(company.revoke(["north"], end=2 * DAY))
    found.refresh()
    assert found.objection(key, north) == "its certificate is revoked; get another one from the authority"
    path.write_bytes(b"half of a copy")
    found.refresh()
    assert found.objection(key, north)
    assert said[-1].startswith(f"--crl {path} is not a readable list of revoked certificates")
    assert said[-1].endswith("; until then the list stays as it was, and after its end no stream is opened")


def test_a_list_that_has_ended_keeps_no_key_from_being_revoked(
    company: Company, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_keys, "_LOOK_S", 0.0)
    (tmp_path / "keys.yaml").write_text(f"{company.folder}/north.crt: [0]\n")
    path, revoked, said = tmp_path / "crl", tmp_path / "revoked.txt", list[str]()
    path.write_bytes(company.revoke([]))
    revoked.write_text("")
    found = NodeKeys(tmp_path / "keys.yaml", revoked, said.append, (path, company.folder / "both.crt"))
    (key,), north = found, (company.folder / "north.crt").read_bytes()
    assert found.lists is not None
    assert found.lists.cover(north)
    now = time.time

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + 2 * DAY

    monkeypatch.setattr(revocation, "datetime", Later)
    monkeypatch.setattr(time, "time", lambda: now() + 2 * DAY.total_seconds())
    for _ in range(3):
        found.refresh()
    (line,) = (line for line in said if "ended on" in line)  # once
    assert line.endswith("; until then the list stays as it was, and after its end no stream is opened")
    assert not found.lists.cover(north)
    assert found.objection(key, north) == ""  # a stream that is open goes on
    revoked.write_text(f"{key}\n")
    found.refresh()
    assert found.objection(key, north) == "its key is revoked; get another one from the server's operator"
