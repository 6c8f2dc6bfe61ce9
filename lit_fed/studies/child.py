"""The process of a cell: the ordinary command line, which ends when the study that started it is gone.

``python -m lit_fed.studies.child fit …`` is such a process. ``python -m lit_fed.studies.child --serve 5`` imports once
what they all need, which takes seconds, and then forks one for every request that comes over that descriptor.

The study holds the other end of the standard input and never writes; when it ends, however it does, the input ends. Two
runs never write into one folder that way, also after the study was killed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence

from lit_fed.command.cli import main

# What main and the runs import when they come to it. Only importing is safe here: a thread, of Python or of a library,
# would not live on in a forked process, and CUDA would not work there.
_NEEDED = (
    *("lit_fed.callbacks", "lit_fed.data", "lit_fed.methods", "lit_fed.participation", "lit_fed.protocols"),
    *("matplotlib.backends.backend_agg", "sklearn.datasets", "torch.utils.tensorboard"),
)


def end_with_parent() -> None:
    """Kill this process's group once standard input ends."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)  # the checkpoints are made for that

    threading.Thread(target=wait, daemon=True).start()


def next_cell(study: socket.socket) -> list[str]:
    """Run a process for every request, one after the other; the only ones that return are these processes.

    A request is a line, the cell's arguments and the path of its log as JSON. It is answered by two lines: the number
    of the process, which is that of its group too, and in the end its exit status, below zero for a signal.

    Args:
        study: Where requests come from. When there are no more, this process ends.

    Returns:
        The cell's arguments.
    """
    for name in _NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a cell then neither searches nor copies what is there already, see run
    requests = study.makefile("rb")
    for line in requests:
        command, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            requests.close()
            study.close()
            os.setpgid(0, 0)
            _write_to(log)
            if sys.platform != "linux":  # elsewhere system libraries do not survive a fork
                os.execv(sys.executable, [sys.executable, "-m", "lit_fed.studies.child", *command])
            return list(command)
        os.setpgid(pid, pid)  # here too, so that it is one whoever comes first
        study.sendall(b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        study.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    sys.exit()


def _write_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def run(args: Sequence[str]) -> int:
    """Run a cell to its very end.

    Taking apart an interpreter that was forked takes longer than some cells do, so all that is left undone is that.

    Args:
        args: The cell's arguments.

    Returns:
        The exit status.
    """
    status = 0
    try:
        main(list(args))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # what the interpreter would do first
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.argv[1:] = next_cell(socket.socket(fileno=int(sys.argv[2])))  # a cell of several processes starts by argv
    end_with_parent()
    os._exit(run(sys.argv[1:]))
