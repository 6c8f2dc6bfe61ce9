"""Configuration files that are none: whatever command reads them, one line names the file and what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lit_fed.command.reading.config_files import read_settings
from tests.command.support import QUICKSTART, error_of

TEXT = QUICKSTART.read_text(encoding="utf-8")
NINE = "[{0},{0},{0},{0},{0},{0},{0},{0},{0}]"
FILES = {
    "UTF-16": (TEXT.encode("utf-16"), "is not UTF-8: byte 0xff at 0; save it as UTF-8"),
    "Latin-1": (b"# caf\xe9\n" + TEXT.encode(), "is not UTF-8: byte 0xe9 at 5; save it as UTF-8"),
    "binary": (bytes(range(256)), "is not UTF-8: byte 0x80 at 128"),
    "UTF-16 without its mark": ("trainer:".encode("utf-16-le"), "is not YAML: unacceptable character #x0000"),
    "a tab": (b"trainer:\n\tmax_rounds: 1\n", ", line 2: found character '\\t' that cannot start any token"),
    "an unclosed list": (b"trainer: [1", ", line 1: expected ',' or ']'"),
    "an unknown tag": (b"trainer: !!python/object:os.system x\n", ", line 1: could not determine a constructor"),
    "deep nesting": (b"a: " + b"[" * 3000, "is nested too deeply"),
    # nine to the power of six values: 9 + 9² + … + 9⁶ > 100,000
    "aliases of aliases": (
        "\n".join(f"{b}: &{b} {NINE.format(f'*{a}' if a else 'x')}" for a, b in zip(" abcde", "abcdef", strict=True))
        .replace("* ", "x")
        .encode(),
        "stands for more than 100,000 values",
    ),
    "a pattern": (b"algorithm: [*lora_B*]\n", "found '*'; put a text that begins with * in quotes"),
    "a pattern's end": (b"algorithm: [*lora_B]\n", "undefined alias 'lora_B'; put a text that begins with * in quotes"),
    "an alias of itself": (b"trainer: &a {logger: *a}\n", "or holds itself"),
    "a number of 5,000 digits": (b"a: " + b"9" * 5000, "cannot be read: Exceeds the limit (4300 digits)"),
    "a key that is no text": (b"1: 2\n", "unknown key 1; keys are names"),
    "a list": (b"- 1\n", "holds no"),
    "nothing": (b"", "holds no"),
}


@pytest.mark.parametrize("command", ["fit", "cost", "simulate", "study"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration_is_named(name, command, capsys):
    content, expected = FILES[name]
    Path("bad.yaml").write_bytes(content)
    message = error_of([command, "-c", "bad.yaml"], capsys)
    assert message.startswith(f"{'study' if command == 'study' else 'config'} file bad.yaml")
    assert expected in message
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("command", ["fit", "test", "cost", "simulate", "study"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("none.yaml", "none.yaml does not exist"),
        (".", ". is a folder"),
        ("pipe", "pipe is not a regular file"),
        ("a\0b", "'a\\x00b'"),
        ("a" * 5000, "aaa cannot be read: File name too long"),
    ],
    ids=["missing", "folder", "pipe", "NUL", "long"],
)
def test_a_path_that_is_no_file_is_named(path, expected, command, capsys):
    os.mkfifo("pipe")
    message = error_of([command, "-c", path], capsys)
    assert expected in message
    assert len(message) < 250


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that not even root can read")
@pytest.mark.parametrize("command", ["fit", "study"])
def test_a_file_that_cannot_be_read_is_named(command, capsys):
    message = error_of([command, "-c", "/proc/self/mem"], capsys)
    assert message.endswith("file /proc/self/mem cannot be read: Input/output error")


def test_the_file_of_a_part_is_read_as_the_others_are(capsys):
    Path("model.yaml").write_bytes(TEXT.encode("utf-16"))
    message = error_of(["fit", "-c", str(QUICKSTART), "--model", "model.yaml"], capsys)
    assert message.startswith("config file model.yaml is not UTF-8")


def test_a_byte_order_mark_and_an_alias_are_no_mistakes(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: &a [1, 2]\nb: *a\n")
    assert read_settings(path) == {"a": [1, 2], "b": [1, 2]}
