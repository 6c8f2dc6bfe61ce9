"""Standard streams on which printing cannot fail, so that a run outlives its reader."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from typing_extensions import override


class _Forgiving(io.FileIO):
    """A raw stream that drops failed writes, and keeps the first error."""

    lost: OSError | None = None

    @override
    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.lost, written = self.lost or error, len(data)
        return written


def open_standard() -> None:
    """Open closed standard streams, as by ``2>&-``, on the null device.

    The next opened file would get their number, and the prints of C code.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 study``, ``2 studies``."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else several}"


@contextmanager
def unfailing() -> Iterator[list[OSError]]:
    """Suppress printing errors: closed pipes and streams, full disks, unencodable characters.

    Unencodable characters are written as escapes. Streams without a file, such as a notebook's, are unchanged.

    Yields:
        The first error on standard output, filled in at the end; empty if only its reader has left.
    """
    before, lost = (sys.stdout, sys.stderr), list[OSError]()
    made = [_unfailing(stream) for stream in before]
    sys.stdout, sys.stderr = made
    try:
        yield lost
    finally:
        for stream in made:
            stream.flush()
        sys.stdout, sys.stderr = before
        raw = _raw(made[0])
        if made[0] is not before[0] and isinstance(raw, _Forgiving) and raw.lost and raw.lost.errno != errno.EPIPE:
            lost.append(raw.lost)


def _unfailing(stream: IO[str] | None) -> Any:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8", errors="replace")
    buffer = getattr(stream, "buffer", None)
    raw = _raw(stream)
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(raw, io.FileIO) or isinstance(raw, _Forgiving):
        return stream
    with suppress(OSError):  # its reader has left already
        stream.flush()
    forgiving = _Forgiving(raw.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        forgiving if buffer is raw else io.BufferedWriter(forgiving),  # unbuffered: python -u
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors in ("strict", "surrogateescape") else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _raw(stream: Any) -> Any:
    """The raw stream below a text stream."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
