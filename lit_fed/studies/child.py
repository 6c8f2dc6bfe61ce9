"""The process of a cell: the ordinary command line, which ends when the study that started it is gone.

``python -m lit_fed.studies.child fit …``. The study holds the other end of this process's standard input and never
writes; when it ends, however it does, the input ends. Two runs never write into one folder that way, also after the
study was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from lit_fed.cli import main


def end_with_parent() -> None:
    """Kill this process's group once standard input ends."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)  # the checkpoints are made for that

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1:])
