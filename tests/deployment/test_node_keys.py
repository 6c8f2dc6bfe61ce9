"""The file that says which clients the holder of a key may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_fed.deployment.keys import Signer
from lit_fed.deployment.node_keys import read_node_keys
from lit_fed.errors import ConfigError

pytest.importorskip("cryptography")


def written(keys: Path, text: str) -> Path:
    path = keys / "written.yaml"
    path.write_text(text)
    return path


def test_a_key_is_bound_to_its_clients(keys: Path) -> None:
    found = read_node_keys(written(keys, "node_0.pub: [0, 2]\nnode_1.pub: [1]\n"))
    by_node = {name: Signer(str(keys / name)).public.hex() for name in ("node_0", "node_1")}
    assert found == {by_node["node_0"]: frozenset({0, 2}), by_node["node_1"]: frozenset({1})}
    assert bytes.fromhex(by_node["node_0"]).startswith(b"-----BEGIN PUBLIC KEY-----")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- node_0.pub", "is not a mapping from public keys to clients; write a line a node"),
        ("", "is not a mapping"),
        ("a: [", "is not valid YAML"),
        ("!!python/object/apply:os.system ['true']: [0]", "is not valid YAML"),
        ("nowhere.pub: [0]", "names nowhere.pub, and .*nowhere.pub cannot be read: no such file or directory"),
        ("node_0: [0]", "node_0 is not a public ECDSA key with 384 bits; make one by ssh-keygen"),
        ("small.pub: [0]", "small.pub is not a public ECDSA key with 384 bits"),
        ("node_0.pub: [0]\nnode_1.pub: [1, 0]", "gives client 0 to node_0.pub and node_1.pub; give it to one of them"),
        ("node_0.pub: [0]\n./node_0.pub: [1]", "has the same key as node_0.pub and ./node_0.pub"),
        ("node_0.pub: [0]\nnode_0.pub: [1]", "names node_0.pub twice"),
        ("node_0.pub: []", "has '\\[\\]' for node_0.pub; clients are ids from 0"),
        ("node_0.pub: [-1]", "clients are ids from 0"),
        ("node_0.pub: ['0']", "clients are ids from 0"),
        ("node_0.pub: [true]", "clients are ids from 0"),
        ("node_0.pub: [1.0]", "clients are ids from 0"),
        ("node_0.pub: [0, 0]", "has client 0 twice for node_0.pub"),
        ("7: [0]", "has '7' in place of a public key's file name"),
    ],
)
def test_files_that_cannot_be(keys: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as told:
        read_node_keys(written(keys, text))
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--node_keys .*none.yaml cannot be read: no such file or directory"):
        read_node_keys(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", "cannot be read: no such file"),
        ("small", "is not a private ECDSA key with 384 bits"),
        ("san", "is not"),
    ],
)
def test_a_private_key_that_cannot_be_is_told(keys: Path, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"--key .*{name} {expected}"):
        Signer(str(keys / name))


def test_no_time_is_signed_twice(keys: Path) -> None:
    signer = Signer(str(keys / "node_0"))
    assert len({signer.headers()["flwr-timestamp"] for _ in range(50)}) == 50
