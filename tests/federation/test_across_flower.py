"""examples/flower_app on Flower's own SuperLink and SuperNodes, where flwr is installed."""

from __future__ import annotations

import ast
import subprocess
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.federation.serving_support import free_address
from tests.federation.support import simulate, small
from tests.support import ROOT, assert_same, run_cli, saved_weights, weights

APP = ROOT / "examples/flower_app"
WHY = "flwr needs an environment of its own, see requirements/flower.txt"


def test_the_app_is_small_and_compiles() -> None:
    files = sorted(path for path in APP.rglob("*") if path.suffix in (".py", ".toml"))
    assert len(files) == 5
    for path in files:
        if path.suffix == ".py":
            compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 150


def test_the_names_that_the_app_imports_exist() -> None:
    """Also where flwr is not installed."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(APP.rglob("*.py"))]
    lines = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    own = [(one.module, name.name) for one in lines if (one.module or "").startswith("lit_fed.") for name in one.names]
    assert len(own) > 5
    assert [name for name in own if not hasattr(import_module(str(name[0])), name[1])] == []


def test_the_two_apps_lead_to_the_simulations_bits_with_a_new_node_for_every_message(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Flower's messages and apps in this process, in place of its SuperLink and SuperNodes."""
    pytest.importorskip("flwr", reason=WHY)
    monkeypatch.syspath_prepend(str(APP))
    monkeypatch.chdir(tmp_path)
    from flwr.app import Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity
    from lit_fed_flower import client_app, server_app

    for name in ("_run_id", "_node_id", "_task_id"):  # which Flower's process sets before it calls an app
        monkeypatch.setattr(TaskIdentity, name, 1)

    class Here:
        def __init__(self) -> None:
            self.contexts = {
                node: Context(1, node, {"clients": str(node - 1), "state_dir": f"states_{node}"}, RecordDict(), {})
                for node in (1, 2)
            }
            self.replies: dict[str, Message] = {}

        def get_node_ids(self) -> list[int]:
            return [*self.contexts]

        def push_messages(self, messages: list[Message]) -> list[str]:
            (message,) = messages
            message.metadata.__dict__["_message_id"] = name = str(len(self.replies))
            self.replies[name] = client_app.app(message, self.contexts[message.metadata.dst_node_id])
            return [name]

        def pull_messages(self, ids: list[str]) -> list[Message]:
            return [self.replies[one] for one in ids]

    make, ours = small(), list[Any]()

    def made(config: Any) -> tuple[Any, tuple[Any, ...]]:
        trainer, *parts = make(tmp_path / str(len(ours)))
        ours.append(trainer)
        return trainer, tuple(parts)

    for module in (client_app, server_app):
        monkeypatch.setattr(module, "made", made)
    grid = Here()
    server_app.main(grid, Context(1, 0, {}, RecordDict(), {}))
    assert len(ours) == 1 + len(grid.replies)  # the server, and a node a message
    assert_same(weights(ours[0]), weights(simulate(make, tmp_path / "simulated")))


@pytest.mark.long
def test_flower_carries_a_federation_to_the_simulations_bits(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("flwr", reason=WHY)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import flower_programs as flower

    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    run = ("-c", ROOT / "configs/quickstart.yaml", "--data.num_clients", "3", "--trainer.max_rounds", "2")
    run += ("--trainer.participation", "FullParticipation")
    for words in (("split", *run, "--output", "parts"), ("fit", *run, "--trainer.default_root_dir", "fit")):
        done = run_cli(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    parts, address, home = tmp_path / "parts", free_address(), tmp_path / "home"
    with ExitStack() as stack:
        host, _, port = address.rpartition(":")
        words = ["flower-superlink", "--insecure", "--host", host, "--port", port]
        stack.enter_context(flower.running([*words, "--disable-runtime-dependency-installation"], home))
        flower.wait_for(address, 120)
        for client in range(3):
            own = f"folder='{parts}' config='client_{client}/config.yaml' clients='{client}' "
            own += f"state_dir='{tmp_path / f'state_{client}'}'"
            words = ["flower-supernode", "--insecure", "--superlink", address, "--host", "127.0.0.1"]
            words += ["--port", free_address().rpartition(":")[2], "--node-config", own]
            stack.enter_context(flower.running(words, tmp_path / f"node_{client}"))
        config = f"folder='{parts}' config='server/config.yaml'"
        words = [flower.program("flwr"), "run", str(APP), flower.connection(address, home), "--run-config", config]
        subprocess.run(words, env=flower.environment(home), check=True, timeout=120)
        server, end = parts / "lightning_logs/version_0", time.monotonic() + 1200  # of two busy cores; idle, 150
        while len((server / "metrics.csv").read_text().splitlines()) < 3 if server.is_dir() else True:
            assert time.monotonic() < end, (home / "flower-superlink.log").read_text()
            time.sleep(0.5)
    assert_same(saved_weights(tmp_path / "fit/lightning_logs/version_0"), saved_weights(server))
