"""The audit log of a server or a node: one line a decision, in a chain of files, and a copy for collectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from logging import Handler, LogRecord, StreamHandler, makeLogRecord
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lit_fed.engine.storage.chain import Chain
from lit_fed.errors import ClientFailure, ConfigError, NobodyLeft
from lit_fed.federation.ends import Alert, log_line, sole_user

NAME = "audit.jsonl"
Copy = Literal["stdout", "syslog"]
_MOST_BYTES, _MOST_FILES = 2**22, 8
_SYSLOG = "/dev/log"


class Audit:
    """The log of an end.

    Args:
        folder: Its folder.
        copy: Where a copy of each line goes.
    """

    def __init__(self, folder: Path, copy: Copy | None) -> None:
        self._chain = Chain(folder / NAME, _MOST_BYTES, _MOST_FILES)
        self._collector = None if copy is None else StreamHandler(sys.stdout) if copy == "stdout" else _syslog()
        for fault in self._chain.faults[:1]:
            log_line(Alert(f"{folder / NAME}: {fault}; lit-fed log {folder} lists what was changed"))

    def write(self, event: str, lasting: bool = True, **facts: Any) -> None:
        """Write a line; it is not `lasting` where the flush to disk would delay a round."""
        at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z"
        line = self._chain.append({"at": at, "event": event, **facts}, lasting)
        if self._collector is not None:
            self._collector.handle(makeLogRecord({"msg": line.rstrip(), "levelname": "INFO"}))

    def say(self, line: str) -> None:
        """Print a line of the operator's, and write it."""
        log_line(line)
        self.write("warning" if isinstance(line, Alert) else "line", text=line)


class _Syslog(SysLogHandler):
    @override
    def handleError(self, record: LogRecord) -> None:
        """Say that a line did not reach the collector; the file has it."""
        log_line(Alert("syslog did not take a line of the audit log"))


def _syslog() -> Handler:
    """The messages of security, which few users may read."""
    if not Path(_SYSLOG).is_socket():
        raise ConfigError(f"--log is syslog, and there is no {_SYSLOG}; start its service, or choose stdout")
    return _Syslog(_SYSLOG, SysLogHandler.LOG_AUTHPRIV)


def hash_of(settings: Mapping[str, str]) -> str:
    """The SHA-256 of the settings that must match on both ends, equal on both."""
    return sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()


@contextmanager
def audit_log(folder: Path, copy: Copy | None, **facts: Any) -> Iterator[Audit]:
    """Open the log of an end, locked for this process, and write that the end starts and why it ends.

    Args:
        folder: The log's folder.
        copy: Where a copy of each line goes.
        facts: What the first line holds.
    """
    from lit_fed import __version__

    with sole_user(folder, "the log"):
        audit = Audit(folder, copy)
        audit.write("start", lit_fed=__version__, **facts)
        why = "it is done"
        try:
            yield audit
        except BaseException as error:
            tells_no_data = isinstance(error, (ClientFailure, NobodyLeft))  # on a server, its cause is a node's
            why = str(error) if tells_no_data else type(error).__name__
            raise
        finally:
            audit.write("end", why=why)
