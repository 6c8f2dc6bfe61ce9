"""What is on the screen before the imports have ended, and how Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

from lit_fed import __version__
from lit_fed.command.table import COMMANDS
from tests.support import ROOT

PATIENCE_S = 5.0  # the line is there after a tenth of a second; a busy machine starts an interpreter more slowly


def read_until(terminal: int, text: str, deadline: float) -> str:
    seen = ""
    while text not in seen and (left := deadline - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                seen += os.read(terminal, 1000).decode()
            except OSError:  # how Linux says that nobody writes any more
                break
    return seen


def test_a_line_is_on_the_terminal_at_once_and_an_interrupted_import_ends_in_130():
    terminal, theirs = pty.openpty()
    command = [sys.executable, str(ROOT / "cli.py"), "fit"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs) as process:
        seen = read_until(terminal, "…", time.monotonic() + PATIENCE_S)
        assert seen.startswith("lit-fed: loading"), seen
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    os.close(theirs)
    assert "Traceback" not in read_until(terminal, "Traceback", time.monotonic() + 0.2)
    os.close(terminal)


def test_where_nobody_watches_nothing_but_the_error_is_written():
    done = subprocess.run([sys.executable, "-m", "lit_fed", "fitt"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "lit-fed: error: there is no command 'fitt'; did you mean fit?\n"


def test_a_deleted_working_directory_is_said_before_anything_is_imported(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"cd {gone} && rmdir {gone} && exec {sys.executable} {ROOT / 'cli.py'} fit"
    done = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True)  # our own words
    assert done.returncode == 2
    assert done.stderr == "lit-fed: error: the working directory has been deleted; change to another\n"


def test_the_package_gives_its_names_and_only_those_without_importing_them_first():
    program = (
        "import sys, lit_fed; assert 'torch' not in sys.modules;"
        "from lit_fed import *; assert Classifier is lit_fed.tasks.Classifier;"
        "assert 'FederatedTrainer' in dir(lit_fed);"
        "print(hasattr(lit_fed, 'Nobody'))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


LIGHT = [
    *(["--version"], ["--help"], ["-h"], ["copy", "--help"]),
    *(["configs", "method"], ["copy", "method/fedavg.yaml"], ["completion", "bash"], ["schema"]),
    *([name, "--help"] for name in ("log", "submit", "runs", "stop")),
]
MISTAKES = [[], ["--hepl"], ["fitt"], ["configs", "metod"], ["copy", "method/fedagv.yaml"]]
PROGRAM = """
import json, sys
from lit_fed.command.start import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        print("exit", stop.code)
print([name for name in ("torch", "lightning", "numpy") if name in sys.modules])
"""


def told_by(commands: list[list[str]]) -> tuple[list[str], list[str]]:
    """What commands print in one process of their own, and the large packages that it has imported."""
    words = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    ended = subprocess.run(
        words, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    *lines, imported = ended.stdout.splitlines()
    assert imported == "[]"
    return lines, ended.stderr.splitlines()


def test_commands_that_answer_at_once_need_no_import_of_pytorch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {words[0] for words in LIGHT if words[0] in COMMANDS} == {name for name in COMMANDS if COMMANDS[name].light}
    lines, errors = told_by(LIGHT)
    assert errors == []
    assert lines[0] == f"lit-fed {__version__}"
    assert any(line.startswith("method/fedavg.yaml ") for line in lines)
    assert (tmp_path / "fedavg.yaml").read_bytes() == (ROOT / "configs/method/fedavg.yaml").read_bytes()
    assert sum("Federated learning for PyTorch Lightning" in line for line in lines) == 2, "--help and -h"


def test_a_mistake_in_the_command_itself_needs_none_either():
    lines, errors = told_by(MISTAKES)
    assert lines == ["exit 2"] * len(MISTAKES)
    assert len(errors) == len(MISTAKES)
    assert all(line.startswith("lit-fed: error: ") for line in errors)


def test_nothing_is_imported_that_a_run_may_do_without():
    """Lightning itself imports torchmetrics, with torchvision, SciPy, Matplotlib, and transformers if installed."""
    rare = [
        "timm",
        "sklearn",
        "pandas",
        "grpc",
        "cryptography",
        "msgspec",
        "onnx",
        "transformers",
        "pyarrow",
        "datasets",
    ]
    program = (
        "import sys, lightning; theirs = set(sys.modules);"
        "import lit_fed.command.federated_cli; from lit_fed.command.roots import import_named; import_named();"
        f"print([name for name in {[*rare, 'jinja2', 'dp_accounting', 'shtab']} if name in set(sys.modules) - theirs])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
