"""One YAML file, opened and parsed once; a file that cannot be used is named in one line."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import yaml

from lit_fed.command.reading.shipped import close_name
from lit_fed.errors import ConfigError
from lit_fed.file_names import shown
from lit_fed.parsing import Text, parsed
from lit_fed.yaml_text import TooManyValues

_MOST_BYTES = 10_000_000
_EMPTY = "holds no settings; write keys such as trainer:, model:, data: and algorithm:"


def read_settings(path: str | Path, kind: str = "config file", empty: str = _EMPTY) -> dict[str, Any]:
    """Mapping in a YAML file.

    Args:
        path: The file.
        kind: Name of such files in messages.
        empty: End of the message about a file without a mapping.
    """
    return settings_of(read_text(path, kind), f"{kind} {brief(path)}", empty)


def read_text(path: str | Path, kind: str = "config file") -> Text:
    """Open and parse a YAML file."""
    where = f"{kind} {brief(path)}"
    try:
        status = Path(path).stat()
        regular = stat.S_ISREG(status.st_mode)  # others, such as pipes, may block, and can be read only once
        text = Path(path).read_text(encoding="utf-8-sig") if regular and status.st_size <= _MOST_BYTES else ""
    except FileNotFoundError as error:
        meant = close_name(path)
        raise ConfigError(f"{where} does not exist" + (f"; did you mean {meant}?" if meant else "")) from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; save it as UTF-8"
        ) from error
    except ValueError as error:  # a path with NUL
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if not regular:
        raise ConfigError(f"{where} is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}")
    if status.st_size > _MOST_BYTES:
        raise ConfigError(f"{where} has {status.st_size:,} bytes; a configuration has at most {_MOST_BYTES:,}")
    return parse_text(text, where)


def parse_text(text: str, where: str) -> Text:
    """Parse YAML.

    Args:
        text: The YAML text.
        where: File or option that it is from, for messages.
    """
    try:
        return parsed(text)
    except TooManyValues as error:
        raise ConfigError(f"{where} {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = "; put a text that begins with * in quotes" if "alias" in f"{error.context} {error.problem}" else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}") from error
    except ValueError as error:  # a number or a name that YAML allows and Python does not
        raise ConfigError(f"{where} cannot be read: {str(error).partition(';')[0]}") from error


def settings_of(text: Text, where: str, empty: str = _EMPTY) -> dict[str, Any]:
    """Mapping in a YAML text."""
    content = text.content
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{where} {empty}")
    if odd := [key for key in content if not isinstance(key, str)]:
        raise ConfigError(f"{where}: unknown key {odd[0]}; keys are names, such as trainer:")
    return content


def brief(path: str | Path) -> str:
    """A path for a message: printable, and no longer than a line."""
    text = shown(path) if str(path) else ""
    if not text or not text.isprintable():
        text = repr(text)
    return text if len(text) <= 120 else f"{text[:60]}…{text[-50:]}"
