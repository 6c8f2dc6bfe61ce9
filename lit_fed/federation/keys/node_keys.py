"""The keys by which nodes and operators are known, and the clients of each node: ``--node_keys`` and ``--revoked``."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import UserDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from lit_fed.data.partitions.cut import named
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import Alert
from lit_fed.federation.keys.changes import Changes
from lit_fed.federation.keys.revocation import RevocationLists

_MOST_BYTES = 2**24
_EXAMPLE = "write a line a node, such as  keys/north.crt: [0, 1, 2]"
_WITH_CEILING = "{clients: [0, 1, 2], most_samples: 5000}"
_HASH = re.compile("[0-9a-f]{64}")
_LOOK_S = 1.0  # interval of looking for changes
_UNKNOWN = "the server does not know its key; send node.crt to the server's operator, who enters it in --node_keys"
_REVOKED = "its certificate is revoked; get another one from the authority"
_BARRED = "its key is revoked; get another one from the server's operator"
_OPERATES = "its key is an operator's, which takes no part in runs; start the node with a node's key"
_NO_OPERATOR = "its key is not an operator's; get one from lit-fed provision, and enter its certificate in --node_keys"
OPERATOR = "operator"
"""The word in place of clients in ``--node_keys``."""
OPERATOR_USE = "2.25.195262143824331925697131291298578592670"
"""Extended key usage of an operator's certificate (RFC 5280, 4.2.1.12), numbered by a random UUID (ITU-T X.667)."""


def key_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate's public key, as ``openssl pkey -pubin -outform DER | sha256sum`` does.

    Raises:
        ValueError: If it is not a certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = x509.load_pem_x509_certificate(certificate).public_key()
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def is_operator(certificate: bytes) -> bool:
    """Whether a certificate in PEM is an operator's, by the extension that its authority signed."""
    from cryptography import x509

    with suppress(x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        uses = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        return OPERATOR_USE in {use.dotted_string for use in uses.value}
    return False


def read_hashes(path: str | Path, option: str) -> frozenset[str]:
    """Read the file of an option that lists keys, one a line, with comments after ``#``; raise `ConfigError`."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {Path(path)} cannot be read ({type(error).__name__}); correct the path") from error
    if odd := next((line for line in lines if line and not _HASH.fullmatch(line)), None):
        raise ConfigError(f"{option} {path} has {odd[:40]!r}; write the SHA-256 of a public key, in 64 hex digits")
    return frozenset(line for line in lines if line)


class Grant(NamedTuple):
    """The clients that a key may claim, and the most training samples that each may report; None for any number.

    The name is that of the certificate's file. An operator has no clients.
    """

    clients: frozenset[int]
    most_samples: int | None = None
    name: str = ""
    operates: bool = False


class NodeKeys(UserDict[str, Grant]):
    """The clients that a node may claim, by the hash of its certificate's public key; revoked keys are left out.

    Args:
        path: A YAML mapping from files of certificates, relative to it, to lists of client ids, or to mappings of
            ``clients`` to such a list and of ``most_samples`` to a number, or to ``operator``.
        revoked: A list of hashes of keys, one a line, with comments after ``#``.
        say: Prints a line.
        crl: Authorities' lists of revoked certificates, and the authorities' certificates; None for no such lists.
    """

    def __init__(
        self,
        path: str | Path,
        revoked: str | Path | None = None,
        say: Callable[[str], object] = print,
        crl: tuple[Path, Path] | None = None,
    ) -> None:
        self.path, self.revoked, self.say = Path(path), None if revoked is None else Path(revoked), say
        self.crl = crl
        self.lists: RevocationLists | None = None
        self._end = math.inf  # when a list ends, which is said once
        self.barred: frozenset[str] = frozenset()
        """The revoked keys."""
        self.operators: dict[str, str] = {}
        """The operators' names, by their keys."""
        self._looked = time.monotonic()
        self.data = self._read()
        self._read_lists()

    def refresh(self) -> None:
        """Read changed files again; while they cannot be read, print why and keep the content before."""
        if time.monotonic() < self._looked + _LOOK_S:
            return
        self._looked = time.monotonic()
        if not self._changes.noticed() and time.time() < self._end:
            return
        self._end = math.inf
        try:
            self.data = self._read()
            accepted = len(self.data) + len(self.operators)
            self.say(f"read {self.path} again: {accepted} keys are accepted, and {len(self.barred)} revoked")
        except ConfigError as error:
            self.say(Alert(f"{error}; until then the keys stay as they were"))
        try:
            self._read_lists()
        except ConfigError as error:
            self.say(Alert(f"{error}; until then the list stays as it was, and after its end no stream is opened"))

    def whose(self, key: str) -> str:
        """Return the holder of an accepted key, in words."""
        if key in self.operators:
            return f"operator {self.operators[key]}"
        return f"the node with the key of {named(self[key].clients) if key in self else 'no client'}"

    def objection(self, key: str, certificate: bytes, operates: bool = False) -> str:
        """Return why a node, or an operator, with this key and certificate in PEM is refused for good, or nothing."""
        if key in self.barred:
            return _BARRED
        if operates and not (key in self.operators and is_operator(certificate)):
            return _NO_OPERATOR
        if not operates and key not in self:
            return _OPERATES if key in self.operators else _UNKNOWN
        return _REVOKED if self.lists is not None and self.lists.has(certificate) else ""

    def _read(self) -> dict[str, Grant]:
        clients, files = read_node_keys(self.path)
        others = [path for path in (self.revoked, *(self.crl or ())) if path is not None]
        self._changes = Changes([self.path, *others, *files])
        self.barred = frozenset() if self.revoked is None else read_hashes(self.revoked, "--revoked")
        accepted = {key: grant for key, grant in clients.items() if key not in self.barred}
        self.operators = {key: grant.name for key, grant in accepted.items() if grant.operates}
        return {key: grant for key, grant in accepted.items() if not grant.operates}

    def _read_lists(self) -> None:
        if self.crl is not None:
            self.lists = RevocationLists(*self.crl)
            self._end = self.lists.end.timestamp()


def read_node_keys(path: Path) -> tuple[dict[str, Grant], list[Path]]:
    """Read the clients by the hash of a public key, and the files of the certificates; raise `ConfigError`."""
    where = f"--node_keys {path}"
    grants: dict[str, Grant] = {}
    names: dict[str, str] = {}
    owners: dict[int, str] = {}
    for name, clients, line in _read(path, where):
        most = None
        if isinstance(clients, dict):
            most = clients.get("most_samples")
            if clients.keys() != {"clients", "most_samples"} or type(most) is not int or most < 1:
                raise ConfigError(
                    f"{where}, line {line}, has {str(clients)[:60]!r} for {name}; write a list of clients, or "
                    f"{_WITH_CEILING} with a number from 1"
                )
            clients = clients["clients"]
        key, operates = _key(path.parent / name, f"{where} names {name}, and")
        if key in grants:
            raise ConfigError(f"{where} has the same key as {names[key]} and {name}; keep one, with all its clients")
        if operates != (clients == OPERATOR):
            wrong = "an operator's certificate, and" if operates else "a certificate of no operator, and"
            raise ConfigError(f"{where}, line {line}: {name} is {wrong} has {str(clients)[:40]!r}; correct one of them")
        if operates:
            grants[key], names[key] = Grant(frozenset(), None, Path(name).stem, True), name
            continue
        ids: list[int] = clients if isinstance(clients, list) else [clients]  # type: ignore[list-item]  # looked at next
        if not ids or any(type(client_id) is not int or client_id < 0 for client_id in ids):
            raise ConfigError(
                f"{where}, line {line}, has {str(clients)[:40]!r} for {name}; clients are ids from 0, as [0, 1, 2]"
            )
        if (twice := next((client_id for client_id in ids if ids.count(client_id) > 1), None)) is not None:
            raise ConfigError(f"{where} has client {twice} twice for {name}; name it once")
        if (taken := next((client_id for client_id in ids if client_id in owners), None)) is not None:
            raise ConfigError(f"{where} gives client {taken} to {owners[taken]} and {name}; give it to one of them")
        owners |= dict.fromkeys(ids, name)
        grants[key], names[key] = Grant(frozenset(ids), most, Path(name).stem), name
    return grants, [path.parent / name for name in names.values()]


def _key(path: Path, where: str) -> tuple[str, bool]:
    """Return a certificate's key, and whether it is an operator's."""
    try:
        content = path.read_bytes()
        return key_of(content), is_operator(content)
    except OSError as error:
        raise ConfigError(f"{where} {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise ConfigError(f"{where} {path} is not a certificate; make one with lit-fed provision") from error


def _read(path: Path, where: str) -> list[tuple[str, object, int]]:
    """Read a mapping's pairs with their lines, duplicates included, of which a YAML loader would keep the last."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{where} has more than {_MOST_BYTES:,} bytes; {_EXAMPLE}")
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode) or not node.value:
            raise ConfigError(f"{where} is not a mapping from certificates to clients; {_EXAMPLE}")
        loader = yaml.SafeLoader("")
        pairs = [
            (
                loader.construct_object(entry, deep=True),
                loader.construct_object(other, deep=True),
                entry.start_mark.line + 1,
            )
            for entry, other in node.value
        ]
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {(error.strerror or str(error)).lower()}; {_EXAMPLE}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is not valid YAML; {_EXAMPLE}") from error
    if odd := next((name for name, *_ in pairs if not isinstance(name, str)), None):
        raise ConfigError(f"{where} has {str(odd)[:40]!r} in place of a certificate's file name; {_EXAMPLE}")
    if twice := next((name for name, *_ in pairs if sum(name == other for other, *_ in pairs) > 1), None):
        raise ConfigError(f"{where} names {twice} twice; name it once, with all its clients")
    return pairs
