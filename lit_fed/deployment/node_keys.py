"""The file of ``--node_keys``: which clients the holder of a key may claim."""

from __future__ import annotations

from pathlib import Path

import yaml

from lit_fed.deployment.keys import read_public_key
from lit_fed.errors import ConfigError

_MOST_BYTES = 2**24
_EXAMPLE = "write a line a node, such as  site_a.pub: [0, 1, 2]"


def read_node_keys(path: str | Path) -> dict[str, frozenset[int]]:
    """Read which clients the holder of a public key may claim.

    Args:
        path: A YAML mapping from files of public keys, relative to it, to lists of client ids.

    Returns:
        The clients by public key, in Flower's wire format as hexadecimal digits.

    Raises:
        ConfigError: If the file or a key is malformed, a key occurs twice, or a client has two keys.
    """
    path = Path(path)
    where = f"--node_keys {path}"
    found: dict[str, frozenset[int]] = {}
    names: dict[str, str] = {}
    owners: dict[int, str] = {}
    for name, clients in _read(path, where):
        key = read_public_key(path.parent / name, f"{where} names {name}, and").hex()
        if key in found:
            raise ConfigError(f"{where} has the same key as {names[key]} and {name}; keep one, with all its clients")
        ids: list[int] = clients if isinstance(clients, list) else [clients]  # type: ignore[list-item]  # looked at next
        if not ids or any(type(one) is not int or one < 0 for one in ids):
            raise ConfigError(f"{where} has {str(clients)[:40]!r} for {name}; clients are ids from 0, as [0, 1, 2]")
        if (twice := next((one for one in ids if ids.count(one) > 1), None)) is not None:
            raise ConfigError(f"{where} has client {twice} twice for {name}; name it once")
        if (taken := next((one for one in ids if one in owners), None)) is not None:
            raise ConfigError(f"{where} gives client {taken} to {owners[taken]} and {name}; give it to one of them")
        owners |= dict.fromkeys(ids, name)
        found[key], names[key] = frozenset(ids), name
    return found


def _read(path: Path, where: str) -> list[tuple[str, object]]:
    """Read the pairs of a mapping, duplicates included, of which a YAML loader would keep the last."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{where} has more than {_MOST_BYTES:,} bytes; {_EXAMPLE}")
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode) or not node.value:
            raise ConfigError(f"{where} is not a mapping from public keys to clients; {_EXAMPLE}")
        loader = yaml.SafeLoader("")
        pairs = [
            (loader.construct_object(one, deep=True), loader.construct_object(other, deep=True))
            for one, other in node.value
        ]
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {(error.strerror or str(error)).lower()}; {_EXAMPLE}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is not valid YAML; {_EXAMPLE}") from error
    if odd := next((name for name, _ in pairs if not isinstance(name, str)), None):
        raise ConfigError(f"{where} has {str(odd)[:40]!r} in place of a public key's file name; {_EXAMPLE}")
    if twice := next((name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1), None):
        raise ConfigError(f"{where} names {twice} twice; name it once, with all its clients")
    return pairs
