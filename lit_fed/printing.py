"""Standard output and error on which printing cannot fail, so that nothing ends because nobody reads what it says."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


class _Forgiving(io.FileIO):
    """The end of a stream: what cannot be written is dropped, and the first reason kept."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, or do as if."""
        try:
            written = super().write(data)
        except OSError as error:
            self.lost, written = self.lost or error, len(data)
        return written


def open_standard() -> None:
    """Give standard input, output and error a place where they are closed, as by ``2>&-``.

    The next file to be opened would get their number, and what C code prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # which has the lowest free number: this one


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 study``, ``2 studies``."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else several}"


@contextmanager
def unfailing() -> Iterator[list[OSError]]:
    """Let nothing that is printed raise: not a closed pipe, a full disk, a closed stream or a missing character.

    Characters that the encoding lacks are written as their numbers. Streams that lead to no file, such as a notebook's,
    stay as they are.

    Yields:
        Why something got lost on the standard output, filled at the end; nothing where its reader has left.
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
    with suppress(OSError):  # its reader has left before
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
    """What a stream writes to in the end."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
