"""Where the passphrase of a private key comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.keys.authority import read_key
from lit_fed.federation.keys.passphrase import VARIABLE, read_passphrase, unlocked


def test_it_is_the_first_line_of_a_file_or_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "phrase"
    for content, expected in ((b"two words \r\nnext\n", b"two words "), (b"caf\xc3\xa9", "café".encode())):
        file.write_bytes(content)
        file.chmod(0o640)
        assert read_passphrase(str(file)) == expected
    assert read_passphrase(None) is None
    monkeypatch.setenv(VARIABLE, "café")
    assert read_passphrase(None) == "café".encode()
    with pytest.raises(ConfigError, match=rf"--key_passphrase_file .*phrase and {VARIABLE} are both set; set one"):
        read_passphrase(str(file))


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        ("secret", 0o604, "is accessible to every user; run chmod 600 "),
        ("secret", 0o602, "is accessible to every user"),
        ("\nsecret", 0o600, "has no first line; write the passphrase there"),
        (None, 0, "cannot be read: no such file or directory"),
    ],
)
def test_a_file_that_does_not_keep_it_is_refused(tmp_path: Path, content: str | None, mode: int, expected: str) -> None:
    file = tmp_path / "phrase"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=expected) as told:
        read_passphrase(str(file))
    assert "secret" not in str(told.value)


def test_a_key_is_opened_by_its_passphrase_and_by_no_other(keys: Path) -> None:
    """As OpenSSL encrypts a key, in both of its formats."""
    old = keys / "old_format.key"
    words = ["openssl", "ec", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", old.name]
    subprocess.run(words, cwd=keys, check=True, capture_output=True)
    for path in (keys / "locked.key", old):
        assert b"ENCRYPTED" in path.read_bytes()
        assert read_key(path, b"secret").private_numbers() == read_key(keys / "server.key").private_numbers()
        assert b"ENCRYPTED" not in unlocked(path, b"secret")
        with pytest.raises(ConfigError, match=rf"the passphrase does not open .*{path.name}; correct one of them"):
            unlocked(path, b"other")
    with pytest.raises(ConfigError, match=r"server.key has no passphrase; leave out --key_passphrase_file or LIT_FED"):
        unlocked(keys / "server.key", b"secret")
