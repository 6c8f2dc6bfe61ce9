"""Configuration files, read and checked before any parser sees them, so that one that is no good is named."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from lit_fed.command.reading.shipped import close_name, is_file, located
from lit_fed.errors import ConfigError
from lit_fed.file_names import shown
from lit_fed.parsing import compose
from lit_fed.yaml_text import TooManyValues, read_yaml

_MOST_BYTES = 10_000_000
_CONFIG = ("-c", "--config")
_ENDINGS = (".yaml", ".yml")
_EMPTY = "holds no settings; write keys such as trainer:, model:, data: and algorithm:"


def check_files(words: Sequence[str]) -> None:
    """Refuse configuration files of a command line that cannot be read, or hold no settings.

    Raises:
        ConfigError: In one line that names the first such file.
    """
    for option, value in options_in(words):
        if (option in _CONFIG and is_name(value)) or (value.endswith(_ENDINGS) and is_file(value)):
            read_settings(value)


def with_located(words: Sequence[str]) -> list[str]:
    """A command line whose configuration files can be opened: those that are not here are the package's own."""
    found = []
    for before, word in zip(("", *words), words, strict=False):
        option, mark, value = word.partition("=")
        if before in _CONFIG and is_name(word):
            word = located(word)
        elif mark and option in _CONFIG and is_name(value):
            word = f"{option}={located(value)}"
        found.append(word)
    return found


def options_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every option of a command line with its value, written as one word or as two; flags with the word after them."""
    for before, word in zip(("", *words), words, strict=False):
        if word.startswith("--") and "=" in word:
            option, _, value = word.partition("=")
            yield option, value
        elif before.startswith("-") and "=" not in before:
            yield before, word


def read_settings(path: str | Path, kind: str = "config file", empty: str = _EMPTY) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Args:
        path: The file.
        kind: What messages call it.
        empty: What they say of one that holds none.

    Raises:
        ConfigError: If it cannot be read, is no UTF-8 text, no YAML, or no mapping from names.
    """
    where = f"{kind} {_brief(path)}"
    try:
        found = Path(path).stat()
        is_file = stat.S_ISREG(found.st_mode)  # others, such as pipes, can be read but once
        content = _load(Path(path), found.st_mtime_ns, found.st_size) if is_file else None
    except FileNotFoundError as error:
        meant = close_name(path)
        raise ConfigError(f"{where} does not exist" + (f"; did you mean {meant}?" if meant else "")) from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is no UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}; save it as UTF-8"
        ) from error
    except TooManyValues as error:
        raise ConfigError(f"{where} {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = "; put a text that begins with * in quotes" if "alias" in f"{error.context} {error.problem}" else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not a YAML text: {str(error).splitlines()[0]}") from error
    except ValueError as error:  # a number, a date or a name that the grammar takes and Python does not
        raise ConfigError(f"{where} cannot be read: {str(error).partition(';')[0]}") from error
    if not is_file:
        raise ConfigError(f"{where} is {'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'}")
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{where} {empty}")
    if odd := [key for key in content if not isinstance(key, str)]:
        raise ConfigError(f"{where}: unknown key {odd[0]}; keys are names, such as trainer:")
    return content


@lru_cache  # a study reads the same files for every cell
def _load(path: Path, _changed_ns: int, size: int) -> Any:
    """What a YAML file holds."""
    if size > _MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, which no configuration has")
    text = path.read_text(encoding="utf-8-sig")
    content = read_yaml(text)
    compose(text)
    return content


def is_name(value: str) -> bool:
    """Whether a value of ``--config`` is meant as a file's name, and not as the settings themselves."""
    return not any(mark in value for mark in "{}\n") and ": " not in value


def _brief(path: str | Path) -> str:
    """A path for a message: printable, and no longer than a line."""
    text = shown(path) if str(path) else ""
    if not text or not text.isprintable():
        text = repr(text)
    return text if len(text) <= 120 else f"{text[:60]}…{text[-50:]}"
