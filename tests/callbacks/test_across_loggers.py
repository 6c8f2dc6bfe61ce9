"""What each of Lightning's loggers is shown, read back from the files it leaves; no server and no network."""

from __future__ import annotations

import csv
import json
import re
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from numpy.typing import NDArray

from lit_fed.callbacks.dashboard import Dashboard
from lit_fed.command.cli import main
from tests.callbacks.test_dashboard import a_run, read, read_hparams, run_rounds
from tests.support import ROOT

BLOCKS = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/loggers.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
PICTURES = {"partition": 0, "participation": 1, "predictions": 1}  # by name, the round of a run with two
EXTRAS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}


class Album(Logger):
    """A stranger's logger that takes pictures as Lightning's own signature has it."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}
        self.pictures: list[tuple[str, int | None, tuple[int, ...]]] = []

    @property
    def name(self) -> str:
        return "album"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.settings.update(params)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_image(self, key: str, images: list[NDArray[Any]], step: int | None = None) -> None:
        self.pictures += [(key, step, image.shape[2:]) for image in images]


def test_any_logger_gets_the_settings_and_one_with_log_image_the_pictures(tmp_path: Path) -> None:
    album, plain = Album(), CSVLogger(tmp_path, name="", version="csv")
    dashboard, run = Dashboard(picture_every=2), a_run(tmp_path, loggers=[album, plain])
    dashboard.on_fit_start(run)
    run_rounds(dashboard, run, 0, 3)
    dashboard.on_fit_end(run)
    assert album.settings["model.lr"] == 0.1
    assert yaml.safe_load((tmp_path / "csv/hparams.yaml").read_text())["model.lr"] == 0.1
    # Drawn before round 0, after round 1 for it is the second, and at the end.
    names = [("partition", 0), ("participation", 1), ("participation", 2), ("predictions", 2)]
    assert album.pictures == [(f"pictures/{name}", step, (3,)) for name, step in names]


@pytest.mark.parametrize("kind", [CSVLogger, Album])
def test_nothing_is_drawn_for_loggers_that_take_no_pictures_or_get_none(kind: type, tmp_path: Path) -> None:
    """A map of all rounds and a pass over test data, for nobody: this federation has nothing to draw, and raises."""
    logger = kind() if kind is Album else kind(tmp_path)
    dashboard = Dashboard(picture_every=1)
    run = a_run(tmp_path, loggers=[logger], enable_pictures=kind is not Album)
    run.federation = type("Undrawn", (), {"data": type("Data", (), {"views": staticmethod(dict)})})
    dashboard.on_fit_start(run)
    run_rounds(dashboard, run, 0, 2)
    dashboard.on_fit_end(run)


def test_a_resumed_run_tells_trackers_again_what_it_is(tmp_path: Path) -> None:
    """They begin a run of their own, while TensorBoard goes on in the folder."""
    album = Album()
    Dashboard().on_fit_start(a_run(tmp_path, start_round=2, loggers=[album]))
    assert album.settings["model.lr"] == 0.1
    assert [(name, step) for name, step, _ in album.pictures] == [("pictures/partition", 2)]


# --- the examples of docs/loggers.md ---------------------------------------------------------------------------------


def loggers_of(block: str) -> dict[str, dict[str, Any]]:
    """The loggers that an example names, and their arguments."""
    logger = yaml.safe_load(block)["trainer"]["logger"]
    entries = logger if isinstance(logger, list) else [logger]
    return {entry["class_path"].rpartition(".")[2]: entry["init_args"] for entry in entries}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "+".join(loggers_of(block)))
def test_the_documented_loggers_show_what_the_docs_say(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = block.replace("mlruns", str(tmp_path / "mlruns"))  # a relative one it would look for in the first test's
    loggers = loggers_of(block)
    for package in (EXTRAS[name] for name in loggers if name in EXTRAS):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # as the page says
    (tmp_path / "loggers.yaml").write_text(block, encoding="utf-8")
    small = ["--trainer.max_rounds", "2", "--trainer.local_epochs", "1", "--trainer.enable_progress_bar", "false"]
    main(["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "-c", "loggers.yaml", *small])
    with open("lightning_logs/version_0/metrics.csv", newline="", encoding="utf-8") as file:
        written = [float(row["global/acc"]) for row in csv.DictReader(file)]
    assert len(written) == 2
    readers = {"TensorBoardLogger": tensorboard, "CSVLogger": csv_file}
    readers |= {"WandbLogger": wandb_run, "MLFlowLogger": mlflow}
    for name, arguments in loggers.items():
        readers[name](arguments, written)


def test_a_run_from_python_has_the_hparams_that_its_user_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/loggers.md").read_text("utf-8"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    logger = names["logger"]
    dashboard, run = Dashboard(), a_run(Path(logger.log_dir), config="", loggers=[logger])
    dashboard.on_fit_start(run)
    run_rounds(dashboard, run, 0, 2)
    dashboard.on_fit_end(run)
    assert read_hparams(Path(logger.log_dir)) == {"params": {"mu": 0.1}, "columns": ["mu"], "metrics": ["global/acc"]}
    accuracies = read(Path(logger.log_dir)).Scalars("global/acc")
    assert [event.step for event in accuracies] == [0, 1]  # and none of the call before the run, at step 0


def tensorboard(arguments: dict[str, Any], accuracies: list[float]) -> None:
    events = read(Path("lightning_logs/version_0"))
    assert [event.value for event in events.Scalars("global/acc")] == pytest.approx(accuracies)
    assert events.Histograms("histograms/clients/acc")[1].step == 1
    assert {tag: events.Images(tag)[0].step for tag in events.Tags()["images"]} == {
        f"pictures/{name}": step for name, step in PICTURES.items()
    }


def csv_file(arguments: dict[str, Any], accuracies: list[float]) -> None:
    folder = Path(arguments["name"]) / "version_0"
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["trainer.max_rounds"] == 2
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        assert [float(row["global/acc"]) for row in csv.DictReader(file)] == pytest.approx(accuracies)


def wandb_run(arguments: dict[str, Any], accuracies: list[float]) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.finish()  # else the next run of this process goes on in this one
    (folder,) = Path("wandb").glob("offline-run-*")
    (path,) = folder.glob("*.wandb")
    rounds: dict[str, list[tuple[int, Any]]] = {}
    config: dict[str, Any] = {}
    for record in map(Record.FromString, leveldb_records(path.read_bytes())):
        values: dict[str, Any] = {}
        for item in record.history.item:
            value = json.loads(item.value_json)
            *outer, last = [item.key] if item.key else item.nested_key
            (values.setdefault(outer[0], {}) if outer else values)[last] = value
        for key, value in values.items():
            rounds.setdefault(key, []).append((values.get("trainer/global_step", -1), value))
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    assert config["model.optimizer.lr"] == 0.1
    assert config["trainer.max_rounds"] == 2
    assert rounds["global/acc"] == [(0, pytest.approx(accuracies[0])), (1, pytest.approx(accuracies[1]))]
    histogram = rounds["histograms/clients/acc"][1][1]
    assert sum(histogram["values"]) == 20  # one for each client
    assert len(histogram["bins"]) == 51  # a fiftieth each, of 0 to 1
    for name, step in PICTURES.items():
        assert rounds[f"pictures/{name}"][0][0] == step
        assert list((folder / "files/media/images/pictures").glob(f"{name}_*.png"))


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """What a ``.wandb`` file holds: LevelDB's log format, after seven bytes of its own."""
    place, whole = 7, b""
    while place + 7 <= len(log):
        if (left := 32768 - place % 32768) < 7:  # too little of a block for a header
            place += left
            continue
        _, length, part = struct.unpack_from("<IHB", log, place)  # checksum, bytes, 1 whole, 2 first, 3 middle, 4 last
        whole += log[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):
            yield whole
            whole = b""


def mlflow(arguments: dict[str, Any], accuracies: list[float]) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{arguments['save_dir']}")
    experiment = client.get_experiment_by_name(arguments["experiment_name"])
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["model.optimizer.lr"] == "0.1"
    history = client.get_metric_history(run.info.run_id, "global/acc")
    assert [(one.step, one.value) for one in sorted(history, key=lambda one: one.step)] == [
        (step, pytest.approx(value)) for step, value in enumerate(accuracies)
    ]
    for name, step in PICTURES.items():
        (picture,) = client.list_artifacts(run.info.run_id, f"pictures/{name}")
        assert picture.path == f"pictures/{name}/round_{step}.png"
