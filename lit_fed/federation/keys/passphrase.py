"""Encrypted private keys: their passphrase comes from a file or the environment, and never from a command line."""

from __future__ import annotations

import os
from pathlib import Path

from lit_fed.errors import ConfigError
from lit_fed.federation.ends import check_secret

VARIABLE = "LIT_FED_KEY_PASSPHRASE"
"""Environment variable of the passphrase."""


def read_passphrase(file: str | None) -> bytes | None:
    """Return the first line of the file of ``--key_passphrase_file``, or the content of `VARIABLE`; None without both.

    Raises:
        ConfigError: If both are given, or the file is unreadable, empty, or accessible to every user.
    """
    given = os.environ.get(VARIABLE)
    if file is None:
        return given if given is None else os.fsencode(given)
    where = f"--key_passphrase_file {file}"
    if given is not None:
        raise ConfigError(f"{where} and {VARIABLE} are both set; set one of them")
    try:
        with Path(file).open("rb") as opened:
            check_secret(opened.fileno(), where)
            phrase = opened.readline().rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {(error.strerror or str(error)).lower()}") from error
    if not phrase:
        raise ConfigError(f"{where} has no first line; write the passphrase there")
    return phrase


def unlocked(path: Path, passphrase: bytes | None) -> bytes:
    """Return a private key in PEM without its passphrase; raise `ConfigError` if the passphrase does not open it."""
    if passphrase is None:
        return path.read_bytes()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), passphrase)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the passphrase does not open {path}; correct one of them") from error
    except TypeError as error:
        raise ConfigError(f"{path} has no passphrase; leave out --key_passphrase_file or {VARIABLE}") from error
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
