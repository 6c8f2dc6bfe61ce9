"""What a site approves is what its node starts, and nothing of what it has not approved is imported."""

from __future__ import annotations

import os
import pty
import py_compile
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.command.federated_cli import make_parsers
from lit_fed.command.reading.config_files import ConfigFiles, FilePart
from lit_fed.command.reading.words import CommandLine
from lit_fed.errors import ConfigError
from lit_fed.federation.commands.node import admit
from lit_fed.federation.node import approval
from lit_fed.federation.node.approval import Plan, check
from tests.support import ROOT

PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
FILE = """\
trainer:
  max_rounds: 4
  callbacks: [{class_path: upload.Upload}]
model: {class_path: lit_fed.tasks.Classifier, init_args: {network: mlp}}
data: {class_path: lit_fed.data.ClientArrays, init_args: {root: ., num_clients: 1, stored_shape: [2], num_classes: 2}}
algorithm: lit_fed.methods.FedAvg
"""
CODE = """\
from pathlib import Path
from lit_fed.callbacks import Callback
Path("imported").touch()
class Upload(Callback): pass
"""

STARTED = "--key node.key is not a file"  # the end of a test's node, once all is imported


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site's folder with the coordinator's files, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", None)  # a node with other code sets both
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setattr(approval, "_imported", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "config.yaml").write_text(FILE)
    (tmp_path / "upload.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("upload", None)


@pytest.fixture
def node(site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Start a node, and return the line with which it ends; ``keys`` are typed at its terminal."""

    def start(*words: str, keys: str | None = None, config: str = "config.yaml") -> str:
        sys.modules.pop("upload", None)
        (site / "imported").unlink(missing_ok=True)
        command = ["node", "-c", config, "--client", "0", "--key", "node.key", *words]
        ends = pty.openpty() if keys is not None else os.pipe()[::-1]
        os.write(ends[0], (keys or "y\n").encode())
        with open(ends[1], encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            with pytest.raises(SystemExit) as stop:
                main(command)
        os.close(ends[0])
        assert stop.value.code == 2
        printed = capsys.readouterr()
        (start.__dict__)["out"] = printed.out
        (line,) = printed.err.splitlines()
        return line.removeprefix("lit-fed: error: ")

    return start


def imported(site: Path) -> bool:
    return (site / "imported").exists()


def test_a_node_asks_once_and_starts_while_nothing_changes(site: Path, node: Callable[..., str]) -> None:
    assert STARTED in node("--approve", keys="y\n")
    assert "upload.Upload (trainer.callbacks.0.class_path)" in vars(node)["out"]
    assert imported(site)
    assert STARTED in node()
    assert vars(node)["out"] == ""
    assert STARTED in node("--approve")  # an approval is there, and nothing is asked
    (kept,) = (site / "approved").iterdir()
    assert re.fullmatch(r"[0-9a-f]{64}\.json", kept.name)
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (site / "config.yaml").write_text("# a comment changes no setting\n" + FILE)
    assert STARTED in node()


@pytest.mark.parametrize(
    ("name", "old", "new", "line"),
    [
        ("config.yaml", "max_rounds: 4", "max_rounds: 5", "trainer.max_rounds: 4 → 5"),
        ("config.yaml", "FedAvg", "FedProx", 'algorithm: "lit_fed.methods.FedAvg" → "lit_fed.methods.FedProx"'),
        ("config.yaml", "max_rounds: 4", "max_rounds: 4\n  seed: 1", "trainer.seed: not set → 1"),
        ("upload.py", "touch()", "exists()", "code of upload: "),
    ],
)
def test_a_changed_configuration_is_refused_with_the_difference(
    site: Path, node: Callable[..., str], name: str, old: str, new: str, line: str
) -> None:
    assert STARTED in node("--approve", keys="y\n")
    (site / name).write_text((site / name).read_text().replace(old, new))
    refusal = node()
    assert refusal.startswith(f"this node has not approved this configuration: changed {line}")
    assert refusal.endswith("; read it, and run with --approve")
    assert refusal.count(" → ") == 1
    assert not imported(site)
    assert STARTED in node("--approve", keys="y\n")
    assert f"  changed     {line}" in vars(node)["out"]


def test_a_files_order_an_option_and_a_file_that_settings_name_count(site: Path, node: Callable[..., str]) -> None:
    (site / "weights.pt").write_bytes(b"1")
    assert STARTED in node("--model.weights", "weights.pt", "--approve", keys="y\n")
    assert STARTED in node("--model.weights", "weights.pt")
    (site / "weights.pt").write_bytes(b"2")
    assert "changed content of model.weights: " in node("--model.weights", "weights.pt")
    (site / "weights.pt").write_bytes(b"1")
    assert 'changed --report: "clients" → "aggregate"' in node("--model.weights", "weights.pt", "--report", "aggregate")
    assert "changed the order in which" in node("--model.weights", "weights.pt", "-c", "config.yaml")


@pytest.mark.parametrize("keys", ["n\n", "\n", "\x04"], ids=["no", "nothing", "end of input"])
def test_what_is_not_approved_is_not_imported_and_not_kept(site: Path, node: Callable[..., str], keys: str) -> None:
    assert node("--approve", keys=keys) == "the configuration is not approved; nothing of it was imported or started"
    assert not imported(site)
    assert not (site / "approved").exists()


def test_without_a_terminal_nothing_is_asked_and_a_hash_approves(site: Path, node: Callable[..., str]) -> None:
    assert "standard input is not a terminal; use one, or give --approved HASH" in node("--approve")
    (told,) = re.findall(r"^  hash        ([0-9a-f]{64})$", vars(node)["out"], re.MULTILINE)
    assert not imported(site)
    assert STARTED in node("--approved", told)
    (site / "config.yaml").write_text(FILE.replace("max_rounds: 4", "max_rounds: 5"))
    refusal = node("--approved", told)
    assert not imported(site)
    (actual,) = re.findall(rf"--approved is {told}, and the hash is ([0-9a-f]{{64}}); read it", refusal)
    assert STARTED in node("--approved", actual)
    assert not (site / "approved").exists()


def test_approvals_are_enforced_while_their_folder_exists(site: Path, node: Callable[..., str]) -> None:
    assert STARTED in node()  # a deployment without approvals starts as ever
    assert STARTED in node("--approve", keys="y\n")
    for path in (site / "approved").iterdir():
        path.unlink()  # one that is withdrawn
    assert "approved holds no approval; read it, and run with --approve" in node()
    assert not imported(site)
    (site / "approved").rmdir()
    assert STARTED in node()


def test_with_trust_other_code_needs_an_approval(site: Path, node: Callable[..., str]) -> None:
    refused = "trainer.callbacks.0.class_path is upload.Upload, which is not among the trusted imports"
    assert node("--trust", "up,uploads").startswith(refused)
    assert not imported(site)
    assert STARTED in node("--trust", "hospital,upload")


@pytest.mark.parametrize(
    "text",
    [
        "lit_fed.command.start.os.system", "lit_fed.command.refusals.suggest.imported",
        "lit_fed.wings.of_wing", "torch.hub.load", "torch.utils.cpp_extension.load", "torch.os.system",
        "torch.nn.parallel.distributed.os.system", "torch.package.PackageImporter",
        "subprocess.run", "sys.exit", "__main__.main", "WandbLogger", "upload.Upload",
        "  upload.Upload", "'upload.Upload'", '"up\\u006coad.Upload"', "{class_path: upload.Upload}",
        '{"class_path": "up\\x6coad.Upload"}', "[1, {a: upload.Upload}]", "{a: '{b: upload.Upload}'}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["class_path", "init_args", "added", "replaced", "section"])
def test_what_can_be_imported_and_is_not_trusted_is_found(site: Path, text: str, place: str) -> None:
    values = {
        "class_path": {"callbacks": [{"class_path": text}]},
        "init_args": {
            "callbacks": [{"class_path": "lit_fed.callbacks.Timer", "init_args": {"deep": {"inside": text}}}]
        },
        "added": {"callbacks+": text},
        "replaced": {"callbacks": [text]},
        "section": text,
    }
    plan = Plan([FilePart(("trainer",), values[place], {}), FilePart(("trainer", "callbacks"), [], {})], {})
    assert len(plan.other) >= 1
    assert not imported(site)
    with pytest.raises(ConfigError, match="which is not among the trusted imports; run with --approve"):
        check(plan, site / "approved")


@pytest.mark.parametrize("text", ["lit_fed_evil.Upload", "torch_evil.nn.Module", "no_such_package.Class", "evil"])
def test_a_class_of_a_module_that_does_not_exist_yet_is_other_code(site: Path, text: str) -> None:
    """As a text that is not a class it is nothing that anybody could import."""
    plan = Plan([FilePart(("trainer",), {"callbacks": [{"class_path": text}]}, {})], {})
    assert plan.other == {text: "trainer.callbacks.0.class_path"}
    assert Plan([FilePart(("trainer",), {"callbacks": [text]}, {})], {}).other == {}


@pytest.mark.parametrize(
    "text", ["lit_fed.methods.FedAvg", "FedProx", "torch.optim.SGD", "torch.nn.ReLU", "torch.optim.lr_scheduler.StepLR",
             "data/north.csv", "cpu", "1e-3", "node.example.org", "mlp"],
)  # fmt: skip
def test_what_is_trusted_or_is_no_import_is_not_called_other_code(site: Path, text: str) -> None:
    assert (
        Plan([FilePart(("model",), {"class_path": "lit_fed.tasks.Classifier", "init_args": {"a": text}}, {})], {}).other
        == {}
    )


def alone(folder: Path, *words: str) -> str:
    """The last line of a node that the installed command starts in a folder."""
    words = ("node", "-c", "config.yaml", "--client", "0", "--key", "node.key", *words)
    program = "from lit_fed.command.start import main; main()"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    return ended.stderr.splitlines()[-1]


def test_files_beside_a_configuration_that_it_does_not_name_are_not_imported(site: Path) -> None:
    """Packages import others where they are installed, as grpc imports grpc_tools."""
    (site / "grpc_tools.py").write_text("from pathlib import Path; Path('imported').touch()")
    (site / "config.yaml").write_text(FILE.replace("  callbacks: [{class_path: upload.Upload}]\n", ""))
    assert STARTED in alone(site, "--trust", "hospital")
    assert not imported(site)


def test_the_code_that_is_read_is_what_runs(site: Path) -> None:
    """A compiled file of other code, with the time and size of the source, is not taken in its place."""
    benign, hostile = site / "upload.py", CODE.replace('"imported"', '"hostile!"')
    benign.write_text(hostile)
    py_compile.compile("upload.py")
    stamp = benign.stat()
    benign.write_text(CODE)
    os.utime(benign, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert STARTED in alone(site, "--trust", "upload")
    assert (imported(site), (site / "hostile!").exists()) == (True, False)


def test_a_compiled_file_of_a_package_counts(site: Path) -> None:
    """Python takes a compiled module before one in its language."""
    (site / "extra").mkdir()
    (site / "extra" / "__init__.py").touch()
    (native := site / "extra" / f"fast{EXTENSION_SUFFIXES[0]}").write_bytes(b"1")
    part = FilePart(("trainer", "callbacks"), [{"class_path": "extra.Upload"}], {})
    before = Plan([part], {})
    native.write_bytes(b"2")
    assert [line.partition(":")[0] for line in Plan([part], {}).differences(before.settings)] == ["code of extra"]


def test_words_are_of_the_setting_that_counts(site: Path) -> None:
    """A later null takes privacy and secure sums away; what other parts leave is printed."""
    private: dict[str, Any] = {
        "privacy": {"class_path": "SampleLevel", "init_args": {"epsilon": 1.0}},
        "secure_sum": {"threshold": 3},
    }
    private["protocols"] = ["GlobalTest", {"class_path": "ClientTest"}]
    parts = [FilePart(("trainer",), private, {}), FilePart(("data",), {"root": "here None"}, {})]
    words = "\n".join(Plan(parts, {}).lines())
    assert "  privacy     SampleLevel, epsilon 1.0\n" in words
    assert "  secure sum  threshold 3; at least threshold nodes\n" in words
    assert "  data        root here None; clients" in words
    assert "  metrics     of each client: training, GlobalTest, ClientTest\n" in words
    words = "\n".join(Plan([*parts, FilePart(("trainer",), {"privacy": None, "secure_sum": None}, {})], {}).lines())
    assert "  privacy     none\n" in words
    assert "  secure sum  none\n" in words


def test_a_proxys_password_is_neither_kept_nor_printed(site: Path, node: Callable[..., str]) -> None:
    assert STARTED in node("--proxy", "http://user:secret@proxy.example.org:3128", "--approve", keys="y\n")
    (kept,) = (site / "approved").iterdir()
    assert "secret" not in kept.read_text()
    assert STARTED in node("--proxy", "http://user:other@proxy.example.org:3128")


def test_a_file_that_changes_after_the_approval_is_not_read_again(site: Path) -> None:
    words = ["node", "-c", "config.yaml", "--client", "0", "--key", "node.key", "--trust", "upload"]
    files, parsers = ConfigFiles(), make_parsers(words, "node".__eq__)[1]
    admit(words, files, parsers["node"])
    (site / "config.yaml").write_text(FILE.replace("max_rounds: 4", "max_rounds: 5"))
    assert CommandLine(words, files).settings.content["trainer"]["max_rounds"] == 4


def test_code_that_changes_while_a_node_stands_is_refused_until_it_starts_anew(site: Path) -> None:
    """Python would go on with what it has imported."""
    words = ["node", "-c", "config.yaml", "--client", "0", "--key", "node.key", "--trust", "upload"]
    parser = make_parsers(words, "node".__eq__)[1]["node"]
    for _ in range(2):
        admit(words, ConfigFiles(), parser)
    assert imported(site)
    (site / "upload.py").write_text(CODE + "# changed\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="the code of upload has changed since this process imported it; restart"):
            admit(words, ConfigFiles(), parser)


def test_the_files_of_the_package_name_other_code_of_lightning_and_torchvision_alone() -> None:
    """File names of data sets, such as ``test.json``, read like a module of Python's own package ``test``."""
    files = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "papers" not in path.parts]
    assert len(files) > 50
    others = {name for path in files for name in Plan([*ConfigFiles().parts(str(path))], {}).other}
    assert {name.partition(".")[0] for name in others} <= {"lightning", "torchvision", "test"}


def test_the_items_of_a_list_are_named_once(site: Path) -> None:
    Path("lists.yaml").write_text(
        "data: {class_path: ClientArrays, init_args: {stored_shape: [1, 8, 8], num_classes: 10}}\n"
        "trainer: {protocols: [GlobalTest, {class_path: Personal, init_args: {epochs: 2}}]}\n"
    )
    parts, options = [*ConfigFiles().parts("lists.yaml")], {"client": ["0", "1"], "report": "clients"}
    text = "\n".join(Plan(parts, options).lines())
    assert "  data        ClientArrays, stored_shape [1, 8, 8], num_classes 10; clients 0, 1\n" in text
    assert "  metrics     of each client: training, GlobalTest, Personal, epochs 2\n" in text


def test_the_page_shows_what_is_printed(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^```text\n\$ (lit-fed node .*? --approve)\n(.*?)^Approve", PAGE, re.MULTILINE | re.DOTALL)
    words = shlex.split(shown[0].replace("\\\n", " "))[1:]
    with pytest.raises(SystemExit):
        main(words)
    hidden = re.compile("[0-9a-f]{64}")  # it has the version in it
    assert hidden.sub("HASH", capsys.readouterr().out) == hidden.sub("HASH", shown[1])
