"""The file that says which clients the holder of a key may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.keys import node_keys
from lit_fed.federation.keys.node_keys import Grant, NodeKeys, key_of


def written(keys: Path, text: str) -> Path:
    path = keys / "written.yaml"
    path.write_text(text)
    return path


def hashed(keys: Path, name: str) -> str:
    return key_of((keys / f"{name}.crt").read_bytes())


def test_a_key_is_bound_to_its_clients(keys: Path) -> None:
    found = NodeKeys(written(keys, "node_0.crt: [0, 2]\nnode_1.crt: [1]\n"))
    assert dict(found) == {
        hashed(keys, "node_0"): Grant(frozenset({0, 2}), name="node_0"),
        hashed(keys, "node_1"): Grant(frozenset({1}), name="node_1"),
    }


def test_a_key_may_have_a_ceiling_of_samples(keys: Path) -> None:
    found = NodeKeys(written(keys, "node_0.crt: {clients: [0, 2], most_samples: 5000}\nnode_1.crt: [1]\n"))
    assert [found[hashed(keys, name)] for name in ("node_0", "node_1")] == [
        Grant(frozenset({0, 2}), 5000, "node_0"),
        Grant(frozenset({1}), name="node_1"),
    ]


def test_what_is_revoked_or_replaced_is_noticed_while_the_server_runs(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_keys, "_LOOK_S", 0.0)
    for name in ("node_0", "node_1", "stranger"):
        (tmp_path / f"{name}.crt").write_bytes((keys / f"{name}.crt").read_bytes())
    path, revoked, said = written(tmp_path, "node_0.crt: [0]\nnode_1.crt: [1]\n"), tmp_path / "revoked.txt", list[str]()
    revoked.write_text("# none yet\n")
    one, other, new = (hashed(keys, name) for name in ("node_0", "node_1", "stranger"))
    found = NodeKeys(path, revoked, said.append)

    def accepted() -> set[str]:
        found.refresh()
        return set(found)

    assert accepted() == {one, other}
    revoked.write_text(f"{one}  # north, 2026-11-27\n")
    assert accepted() == {other}
    (tmp_path / "node_0.crt").write_bytes((keys / "stranger.crt").read_bytes())  # replaced under the same name
    assert accepted() == {new, other}
    assert said == [f"read {path} again: {count} keys are accepted, and 1 revoked" for count in (1, 2)]
    revoked.write_text("half of a copy")
    assert accepted() == {new, other}
    assert "revoked.txt has 'half of a copy'; write the SHA-256 of a public key, in 64 hex digits; until" in said[-1]
    path.unlink()
    assert accepted() == {new, other}
    assert "no such file or directory" in said[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- node_0.crt", "is not a mapping from certificates to clients; write a line a node"),
        ("", "is not a mapping"),
        ("a: [", "is not valid YAML"),
        ("!!python/object/apply:os.system ['true']: [0]", "is not valid YAML"),
        ("nowhere.crt: [0]", "names nowhere.crt, and .*nowhere.crt cannot be read: no such file or directory"),
        ("node_0.key: [0]", "node_0.key is not a certificate; make one with lit-fed provision"),
        ("node_0.crt: [0]\nnode_1.crt: [1, 0]", "gives client 0 to node_0.crt and node_1.crt; give it to one of them"),
        ("node_0.crt: [0]\n./node_0.crt: [1]", "has the same key as node_0.crt and ./node_0.crt"),
        ("node_0.crt: [0]\nnode_0.crt: [1]", "names node_0.crt twice"),
        ("node_0.crt: []", "has '\\[\\]' for node_0.crt; clients are ids from 0"),
        ("node_0.crt: [-1]", "clients are ids from 0"),
        ("node_0.crt: ['0']", "clients are ids from 0"),
        ("node_0.crt: [true]", "clients are ids from 0"),
        ("node_0.crt: [1.0]", "clients are ids from 0"),
        ("node_0.crt: [0, 0]", "has client 0 twice for node_0.crt"),
        (
            "node_1.crt: [1]\nnode_0.crt: {clients: [0], most_samples: 0}",
            "line 2, has .*'most_samples': 0.* for node_0.crt; write a list of clients, or {clients: .*from 1",
        ),
        ("node_0.crt: {clients: [0]}", "line 1, has .* for node_0.crt; write a list"),
        ("node_0.crt: {clients: [0], most_samples: 1, x: 2}", "line 1, has .* for node_0.crt; write a list"),
        ("\nnode_0.crt: {clients: [x], most_samples: 1}", "line 2, has .* for node_0.crt; clients are ids"),
        ("7: [0]", "has '7' in place of a certificate's file name"),
    ],
)
def test_files_that_cannot_be(keys: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as told:
        NodeKeys(written(keys, text))
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--node_keys .*none.yaml cannot be read: no such file or directory"):
        NodeKeys(tmp_path / "none.yaml")
