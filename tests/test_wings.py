"""The borders: a wing imports the core by its faces and by the seams that are listed here, and the core no wing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "lit_fed"
FACES = {
    "lit_fed", "lit_fed.algorithm", "lit_fed.arguments", "lit_fed.callbacks", "lit_fed.checks",
    "lit_fed.codecs", "lit_fed.data", "lit_fed.errors", "lit_fed.file_names", "lit_fed.losses",
    "lit_fed.machine", "lit_fed.methods", "lit_fed.networks", "lit_fed.parsing", "lit_fed.participation",
    "lit_fed.printing", "lit_fed.privacy", "lit_fed.private_names", "lit_fed.protocols", "lit_fed.robust",
    "lit_fed.seeding", "lit_fed.tasks", "lit_fed.tensors", "lit_fed.tracking", "lit_fed.trainer", "lit_fed.yaml_text",
}  # fmt: skip
"""What everybody may import: public faces, and the tools at the bottom of the core."""
SEAMS: dict[str, set[str]] = {
    "federation": {
        "lit_fed.callbacks.progress",
        "lit_fed.callbacks.recorder",
        "lit_fed.command.command",
        "lit_fed.command.endings",
        "lit_fed.command.reading.config_files",
        "lit_fed.command.reading.own",
        "lit_fed.command.reading.parts",
        "lit_fed.command.reading.settings",
        "lit_fed.command.reading.shipped",
        "lit_fed.command.reading.words",
        "lit_fed.command.refusals.explain",
        "lit_fed.command.refusals.spelling",
        "lit_fed.command.refusals.suggest",
        "lit_fed.command.roots",
        "lit_fed.command.table",
        "lit_fed.data.formats.folders",
        "lit_fed.data.partitions.cut",
        "lit_fed.data.population.census",
        "lit_fed.data.population.figures",
        "lit_fed.data.population.naming",
        "lit_fed.data.population.pictures",
        "lit_fed.engine.clients.executor",
        "lit_fed.engine.clients.local",
        "lit_fed.engine.clients.session",
        "lit_fed.engine.evaluation.federation",
        "lit_fed.engine.evaluation.prediction",
        "lit_fed.engine.evaluation.protocols",
        "lit_fed.engine.loop.checkpoint",
        "lit_fed.engine.loop.run",
        "lit_fed.engine.loop.runs",
        "lit_fed.engine.method.algorithm",
        "lit_fed.engine.method.client",
        "lit_fed.engine.method.reducers",
        "lit_fed.engine.method.wrapper",
        "lit_fed.engine.storage.chain",
        "lit_fed.engine.storage.files",
        "lit_fed.engine.storage.packs",
        "lit_fed.engine.storage.run_lock",
        "lit_fed.engine.wire.channel",
        "lit_fed.engine.wire.payload",
        "lit_fed.engine.wire.request",
        "lit_fed.engine.wire.totals",
        "lit_fed.engine.wire.updates",
        "lit_fed.engine.wire.workers",
        "lit_fed.networks.base",
        "lit_fed.participation.asynchronous",
        "lit_fed.participation.samplers",
        "lit_fed.privacy.accounting",
        "lit_fed.privacy.bounded_sum",
        "lit_fed.privacy.keys",
    },
    "poses": {
        "lit_fed.data.formats.folders",
        "lit_fed.data.loaders.image_files",
        "lit_fed.data.loaders.tensor_loader",
        "lit_fed.data.loaders.transforms",
        "lit_fed.data.loaders.worker_loader",
        "lit_fed.data.partitions.csr",
        "lit_fed.data.partitions.cut",
        "lit_fed.data.partitions.partition",
        "lit_fed.data.population.base",
        "lit_fed.data.population.dataset_module",
        "lit_fed.data.population.files",
        "lit_fed.data.population.hooks",
        "lit_fed.data.population.naming",
        "lit_fed.data.population.pictures",
        "lit_fed.data.population.views",
        "lit_fed.data.remarks",
        "lit_fed.networks.base",
        "lit_fed.networks.registry",
        "lit_fed.networks.weights",
        "lit_fed.tasks.on_network",
    },
    "record": {
        "lit_fed.callbacks.boards",
        "lit_fed.callbacks.recorder",
        "lit_fed.command.command",
        "lit_fed.command.federated_cli",
        "lit_fed.command.reading.own",
        "lit_fed.command.reading.parts",
        "lit_fed.data.population.naming",
        "lit_fed.data.population.pictures",
        "lit_fed.engine.evaluation.protocols",
        "lit_fed.engine.loop.checkpoint",
        "lit_fed.engine.loop.run",
        "lit_fed.engine.method.wrapper",
        "lit_fed.engine.storage.chain",
        "lit_fed.engine.storage.files",
        "lit_fed.engine.vectorized.alone",
        "lit_fed.engine.wire.payload",
        "lit_fed.engine.wire.workers",
        "lit_fed.handover.card",
        "lit_fed.patterns",
    },
    "studies": {
        "lit_fed.callbacks.boards",
        "lit_fed.callbacks.progress",
        "lit_fed.callbacks.recorder",
        "lit_fed.command.cli",
        "lit_fed.command.command",
        "lit_fed.command.commands.cost",
        "lit_fed.command.federated_cli",
        "lit_fed.command.reading.config_files",
        "lit_fed.command.reading.parts",
        "lit_fed.command.reading.shipped",
        "lit_fed.command.reading.words",
        "lit_fed.command.refusals.explain",
        "lit_fed.command.roots",
        "lit_fed.data.population.census",
        "lit_fed.engine.lightning.compatibility",
        "lit_fed.engine.lightning.metric_names",
        "lit_fed.engine.method.algorithm",
        "lit_fed.engine.storage.files",
        "lit_fed.methods.attention_freezing.projections",
        "lit_fed.methods.distillation.densities",
        "lit_fed.methods.distillation.teacher_error",
    },
}
"""Modules in rooms of the core that a wing imports; a new one is a coupling, and needs a reason in its commit."""


def modules_imported(path: Path) -> set[str]:
    """Modules of this package that a file imports, those for types included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                found.add(inner if is_module(inner) else node.module)
    return {name for name in found if name.partition(".")[0] == "lit_fed"}


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@pytest.mark.parametrize("wing", SEAMS)
def test_a_wing_reaches_into_the_core_by_its_seams_alone(wing: str) -> None:
    files = sorted((PACKAGE / wing).rglob("*.py"))
    found = {name for path in files for name in modules_imported(path)}
    inside = tuple(f"lit_fed.{other}" for other in SEAMS)
    core = {name for name in found if not f"{name}.".startswith(tuple(f"{one}." for one in inside))}
    assert core - FACES == SEAMS[wing]


def test_the_core_imports_no_wing() -> None:
    """Not even for types; `lit_fed/wings.py` loads by name."""
    wings = tuple(f"lit_fed.{wing}." for wing in SEAMS)
    core = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in SEAMS]
    assert len(core) > 200
    reached = {path.name: name for path in core for name in modules_imported(path) if f"{name}.".startswith(wings)}
    assert reached == {}
