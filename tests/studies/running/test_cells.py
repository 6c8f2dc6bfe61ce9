"""Cells: the command each one is, what tells two of them apart, and what is refused before any of them runs."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lit_fed import Classifier
from lit_fed.command.federated_cli import resolve
from lit_fed.data import IID, Digits
from lit_fed.errors import ConfigError
from lit_fed.studies.file.promised import metric_names
from lit_fed.studies.file.study import Place, read_study
from lit_fed.studies.results.results import caption, collect
from lit_fed.studies.running.cells import _ANY, Cell, chosen, lay_out
from lit_fed.studies.running.jobs import share_machine
from lit_fed.studies.running.parts import check_metrics, check_parts
from tests.studies.support import CONFIGS, TINY, finish, grid_of


class Anonymous(Classifier):
    """Says nothing of what it logs."""

    metrics = None


SHARED = "All seeds share one partition (data.seed)."


def error(function, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_a_cell_is_an_ordinary_command(tmp_path):
    cell = grid_of(tmp_path, seeds=[3, 4], set=TINY["set"] | {"data.init_args.seed": "{seed}"}).cells[1]
    files = [f"{CONFIGS}/{name}.yaml" for name in ("quickstart", "method/fedavg", "data/digits_iid")]
    settings = ["trainer.max_rounds=2", "trainer.logger=false", "trainer.participation.init_args.count=2"]
    settings += ["trainer.local_epochs=null", "trainer.local_steps=2", "data.init_args.seed=4"]
    words = [word for file in files for word in ("-c", file)] + [f"--{setting}" for setting in settings]
    assert cell.name == "fedavg/iid/4"
    assert cell.shell == shlex.join(["lit-fed", "fit", *words, "--trainer.seed=4"])
    folder = tmp_path / "out/tiny/pocket/fedavg/iid/seed_4"
    assert cell.command[-2:] == [f"--trainer.default_root_dir={folder}", "--ckpt_path=last"]
    assert (cell.config["trainer"]["seed"], cell.config["data"]["init_args"]["seed"]) == (4, 4)


@pytest.mark.parametrize(
    ("asks", "draws"),
    [
        ({}, False),
        ({"pictures": ["views"]}, True),
        ({"set": TINY["set"] | {"trainer.enable_pictures": True}}, True),
    ],
)
def test_a_cell_draws_pictures_only_for_a_study_that_asks_for_them(asks, draws, tmp_path):
    (cell, _), (plain, _) = (grid_of(tmp_path, name, **changes).cells for name, changes in (("a", asks), ("b", {})))
    config = yaml.safe_load(resolve(cell.command))
    assert config["trainer"]["enable_pictures"] is draws
    assert cell.fingerprint == plain.fingerprint, "pictures change no result"


@pytest.mark.parametrize(
    ("changes", "of_data", "told"),
    [
        ({}, [3, 4], "Every seed also seeds the partition (data.seed)."),
        ({"partition_seed": "fixed"}, [55, 55], SHARED),  # quickstart.yaml has data.seed 55
        ({"set": TINY["set"] | {"data.seed": 7}}, [7, 7], SHARED),
        (
            {"set": TINY["set"] | {"data": {"init_args": {"seed": 7}}}},
            [7, 7],
            SHARED,
        ),
    ],
    ids=["by default", "fixed", "a setting", "a nested setting"],
)
def test_a_seed_seeds_the_partition_unless_the_study_says_otherwise_and_the_table_says_which(
    changes, of_data, told, tmp_path
):
    grid = grid_of(tmp_path, seeds=[3, 4], **changes)
    seeds = [(c.config["trainer"]["seed"], c.config["data"]["init_args"]["seed"]) for c in grid.cells[:2]]
    assert seeds == list(zip([3, 4], of_data, strict=True))
    assert caption(collect(grid))[-1] == told
    assert yaml.safe_load(resolve(["fit", *grid.cells[1].args])) == grid.cells[1].config, (
        "the printed command gives the same"
    )


def test_a_table_names_the_places_that_share_a_partition(tmp_path):
    rows = {"a": {}, "b": {"set": {"data.init_args.seed": 0}}}
    told = grid_of(tmp_path, seeds=[3, 4], rows=rows).partitions
    assert told == "Every seed also seeds the partition (data.seed), except at b/iid."
    assert grid_of(tmp_path, "one", seeds=[3]).partitions == "", "one seed has one partition"


class Unseeded(Digits):
    """Has no seed to set."""

    def __init__(self, num_clients: int = 10) -> None:
        super().__init__(num_clients, partition=IID())


def test_data_without_a_seed_share_their_partition(tmp_path):
    data = {"data": {"class_path": "tests.studies.running.test_cells.Unseeded"}}
    parts = {**data, "model": "Classifier", "algorithm": "FedAvg"}
    grid = grid_of(tmp_path, seeds=[3, 4], configs=[], set=parts, rows={"a": {}}, columns={"x": {}})
    assert grid.partitions == SHARED
    assert "data.init_args.seed" not in grid.cells[0].shell


def test_a_partitions_seed_is_each_or_fixed(tmp_path):
    message = error(grid_of, tmp_path, partition_seed="own")
    assert message.endswith("partition_seed is 'own'; it must be each or fixed")


def test_seeds_arrive_wherever_they_are_asked_for_and_in_what_form(tmp_path):
    asks = {"data.init_args.partition": {"class_path": "Dirichlet", "init_args": {"alpha": "{seed}"}}}
    asks |= {"model.init_args.network": "small_cnn_{seed}", "data.init_args.seed": "{seed}"}
    cells = grid_of(tmp_path, seeds=[3, 4], set=TINY["set"] | asks, columns={"x": {}}).cells[:2]
    parts = [(c.config["data"]["init_args"], c.config["model"]["init_args"]) for c in cells]
    found = [(data["seed"], data["partition"]["init_args"]["alpha"], model["network"]) for data, model in parts]
    assert repr(found) == "[(3, 3.0, 'small_cnn_3'), (4, 4.0, 'small_cnn_4')]", "α is a float, as the command has it"
    assert all(str(_ANY) not in str((cell.args, cell.config)) for cell in cells)


def test_a_setting_that_takes_no_seed_is_told_of_a_seed(tmp_path):
    message = error(grid_of, tmp_path, seeds=[3], set={"model.init_args.optimizer.init_args.maximize": "{seed}"})
    assert message.endswith("model.init_args.optimizer.init_args.maximize: expected true or false, not 3")


def test_later_parts_win(tmp_path):
    rows = {"a": {"set": {"trainer.local_steps": 3}}}
    columns = {"x": {}, "y": {"set": {"trainer.local_steps": 4}}}
    grid = grid_of(tmp_path, rows=rows, columns=columns)
    assert [cell.config["trainer"]["local_steps"] for cell in grid.cells] == [3, 4]


def test_columns_that_differ_in_the_metric_share_their_runs(tmp_path):
    columns = {"global": {}, "clients": {"metric": "clients/acc_mean"}, "more": {"set": {"trainer.max_rounds": 3}}}
    grid = grid_of(tmp_path, columns=columns)
    assert [cell.name for cell in grid.cells] == ["fedavg/global/0", "fedavg/more/0", "prox/global/0", "prox/more/0"]
    assert grid.runs[Place("prox", "clients"), 0] is grid.runs[Place("prox", "global"), 0]
    # Accuracies 0.5 and 0.75 of the same two rounds.
    finish(grid, "prox", "global", 0, "round,global/acc,clients/acc_mean\n0,0.25,0.5\n1,0.5,0.75\n")
    assert (grid.value(("prox", "global"), 0), grid.value(("prox", "clients"), 0)) == (0.5, 0.75)
    assert grid.curve(("prox", "clients"), 0) == [(0, 0.5), (1, 0.75)]


def test_the_last_the_best_or_all_evaluated_rounds_count(tmp_path):
    metrics = "round,global/acc,train/loss\n0,0.5,2\n1,0.875,nan\n2,0.75,4\n3,,3\n"
    tied = "round,global/acc,train/norm\n0,0.5,9\n1,0.875,5\n2,0.875,4\n"
    for name, report, metric, expected in (
        ("a", "last", "global/acc", 75.0),
        ("b", "best", "global/acc", 87.5),
        ("c", "last", "train/loss", 300.0),
        ("d", "best", "train/loss", 200.0),
        ("e", "mean", "global/acc", (50 + 87.5 + 75) / 3),
        ("f", "best of train/loss", "global/acc", 50.0),  # whose smallest is in round 0
        ("g", "best of global/acc", "train/norm", 500.0),  # of the first of two rounds that are best alike
        ("h", "first global/acc at 0.75", "train/loss", math.nan),  # round 1, the first one at 0.75 or above
        ("i", "first train/loss at 3.5", "global/acc", 50.0),  # round 0; lower is better
        ("j", "first global/acc at 0.9", "train/loss", math.inf),  # never
    ):
        (tmp_path / name).mkdir()
        grid = grid_of(tmp_path / name, metric=metric, report=report, scale=100)
        finish(grid, "prox", "iid", 0, tied if name == "g" else metrics)
        assert grid.value(("prox", "iid"), 0) == pytest.approx(expected, nan_ok=True)
        assert grid.value(("fedavg", "iid"), 0) is None


def test_without_a_metric_the_runs_monitor_counts(tmp_path):
    bare = {key: value for key, value in TINY.items() if key != "metric"}
    promised = grid_of(tmp_path, metric="")
    assert promised.measure_of(("prox", "iid")).metric == "global/acc", "Classifier declares it"
    (tmp_path / "stranger.yaml").write_text(yaml.safe_dump(bare | {"set": TINY["set"] | {"model": "Anonymous"}}))
    grid = lay_out(read_study(tmp_path / "stranger.yaml", "pocket"), tmp_path / "out")
    assert grid.measure_of(("prox", "iid")).metric == "", "it declares nothing"
    finish(grid, "prox", "iid", 0, "round,train/loss,clients/wer_mean,global/wer\n0,1,0.5,\n1,1,0.5,0.25\n")
    measure = grid.measure_of(("prox", "iid"))
    assert (measure.metric, measure.lower, grid.value(("prox", "iid"), 0)) == ("global/wer", True, 0.25)


def test_other_settings_are_another_run_and_comments_are_not(tmp_path):
    grid = grid_of(tmp_path)
    cell = grid.cells[0]
    finish(grid, "fedavg", "iid", 0, "round,global/acc\n1,0.5\n")
    assert cell.done
    (tmp_path / "base.yaml").write_text("# said otherwise\n" + (CONFIGS / "quickstart.yaml").read_text())
    assert grid_of(tmp_path, configs=[str(tmp_path / "base.yaml")]).cells[0].done, "the same settings from another file"
    (tmp_path / "base.yaml").write_text((CONFIGS / "quickstart.yaml").read_text().replace("lr: 0.1", "lr: 0.2"))
    other = grid_of(tmp_path, configs=[str(tmp_path / "base.yaml")]).cells[0]
    assert (other.changed, other.done) == (True, False)
    assert other.set_aside() == cell.folder.with_name("seed_0.before_1")
    assert (other.changed, other.done) == (False, False)


def test_a_setting_that_came_since_and_is_off_changes_no_cell(tmp_path):
    cell = grid_of(tmp_path).cells[0]

    def digest(**data):
        config = dict(cell.config)
        config["data"] = {**config["data"], "init_args": {**config["data"]["init_args"], **data}}
        return replace(cell, config=config).fingerprint

    assert {digest(new=off) for off in (None, False)} == {cell.fingerprint}
    assert digest(new={"within": None}) == digest(new={}) != cell.fingerprint
    assert len({cell.fingerprint, *(digest(new=on) for on in (0, 1, True, "", [None], []))}) == 7


def test_a_half_written_line_is_not_read(tmp_path):
    grid = grid_of(tmp_path)
    finish(grid, "fedavg", "iid", 0, "round,global/acc\n0,0.5\n1,0.")
    assert grid.cells[0].curve("global/acc") == [(0, 0.5)]


def test_cells_are_chosen_by_row_column_and_seed(tmp_path):
    grid = grid_of(tmp_path, seeds=[0, 1])

    def names(*only):
        return [cell.name for _, cell in chosen([grid], only)]

    assert names() == ["fedavg/iid/0", "fedavg/iid/1", "prox/iid/0", "prox/iid/1"]
    assert names("prox") == names("prox/*/*") == ["prox/iid/0", "prox/iid/1"]
    assert names("*/iid/0", "prox/iid/1") == ["fedavg/iid/0", "prox/iid/0", "prox/iid/1"]
    assert error(names, "prux").startswith(
        "--only prux matches no cell; cells are row/column/seed, such as fedavg/iid/0"
    )


def test_jobs_share_the_cores_by_what_the_configurations_ask_for(tmp_path, monkeypatch):
    cells = grid_of(tmp_path).cells
    monkeypatch.setattr("lit_fed.studies.running.jobs.available_cores", lambda: 8)
    assert [(s.jobs, s.threads) for s in (share_machine(cells, None), share_machine(cells, 3))] == [(8, 1), (3, 2)]
    more = grid_of(tmp_path, set=TINY["set"] | {"trainer.num_threads": 2, "trainer.devices": 2}).cells
    assert share_machine(more, None).jobs == 2


# --- refused before any cell runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"configs": ["nowhere.yaml"]}, "fedavg/iid: config file nowhere.yaml does not exist"),
        ({"set": {"trainer.max_round": 2}}, "unknown option trainer.max_round; did you mean trainer.max_rounds?"),
        ({"rows": {"a": {"set": {"model": "FedProxx"}}}}, "a/iid: model: there is no LightningModule named 'FedProxx'"),
        ({"set": {"trainer.seed": 2}}, "set: trainer.seed is set by the study; use seeds"),
        ({"set": {3: 2}}, "set: 3 is not a key"),
    ],
    ids=str,
)
def test_a_misspelt_config_or_setting(changes, expected, tmp_path):
    message = error(grid_of, tmp_path, **changes)
    assert message.startswith(f"{tmp_path / 'tiny.yaml'}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"metric": "global/accuracy"}, "does not report the metric 'global/accuracy'; did you mean global/acc?"),
        (
            {"report": "best of global/accuracy"},
            "does not report the metric 'global/accuracy'; did you mean global/acc?",
        ),
        ({"metric": "clients/acc"}, "does not report the metric 'clients/acc'; did you mean clients/acc_"),
        ({"metric": "personal/acc_mean"}, "does not report the metric 'personal/acc_mean'; did you mean"),
        ({"metric": "comm/bytes"}, "does not report the metric 'comm/bytes'; did you mean comm/"),
        ({"columns": {"iid": {"metric": "acc"}}}, "fedavg/iid does not report the metric 'acc'"),
        ({"set": {"trainer.evaluate_every": 0}}, "does not report the metric 'global/acc'"),
        (
            {"claims": [{"claim": "prox > fedavg", "metric": "drift/norm"}]},
            "does not report the metric 'drift/norm'; did you",
        ),
    ],
    ids=str,
)
def test_an_unknown_metric_that_the_configuration_rules_out(changes, expected, tmp_path):
    assert expected in error(check_metrics, grid_of(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "clients/acc_p10"},
        {"metric": "personal/acc_mean", "set": {"trainer.protocols": [{"class_path": "PersonalTest"}]}},
        {"metric": "time/eval_s"},
        {"metric": "train/loss"},
        {"metric": "global/acc", "report": "best of val/global/acc"},
    ],
    ids=str,
)
def test_a_metric_that_the_configuration_promises(changes, tmp_path):
    check_metrics(grid_of(tmp_path, **changes))


def test_a_round_tells_whether_there_are_metrics_on_validation_data(tmp_path):
    without = {"set": TINY["set"] | {"data.init_args.val_fraction": 0}, "report": "best of val/global/acc"}
    grid = grid_of(tmp_path, **without)
    message = error(check_metrics, grid, grid.cells, lambda cell: ["round", "global/acc"])
    assert "does not report the metric 'val/global/acc'" in message


@pytest.mark.parametrize(
    ("metric", "held_out", "expected"),
    [
        ("val/clients/acc_meen", 0.1, "did you mean val/clients/acc_mean?"),
        ("val/clients/acc_mean", 0, "set data.init_args.val_fraction above 0"),
        ("clients/acc_meen", 0.1, "did you mean clients/acc_mean?"),
    ],
)
def test_a_hint_never_leads_from_validation_data_to_the_test_set(tmp_path, metric, held_out, expected):
    grid = grid_of(tmp_path, set=TINY["set"] | {"data.init_args.val_fraction": held_out}, metric=metric)
    message = error(check_metrics, grid, grid.cells, lambda cell: ["round", "global/acc", "clients/acc_mean"])
    assert message.endswith(f"does not report the metric {metric!r}; {expected}")


def test_clients_validation_data_give_a_metric_without_a_monitor(tmp_path):
    check_metrics(grid_of(tmp_path, metric="val/clients/acc_mean", report="best"))


def test_a_callback_may_add_metrics(tmp_path):
    listening = {"set": {"trainer.callbacks": [{"class_path": "Alignment"}]}, "metric": "alignment/observed"}
    check_metrics(grid_of(tmp_path, **listening))
    asked = []
    grid = grid_of(tmp_path, **listening)
    check_metrics(grid, grid.cells, lambda cell: asked.append(cell) or ["round", "alignment/observed"])
    assert asked


def test_views_add_metrics(tmp_path):
    puppets = [f"{CONFIGS}/papers/raf/runs/puppets.yaml"]
    grid = grid_of(tmp_path, configs=puppets, set={}, metric="global/pck_80x60", columns={"x": {}})
    told = ["round", "global/pck", "global/pck_80x60"]
    check_metrics(grid, grid.cells, lambda cell: told)
    grid = grid_of(tmp_path, configs=puppets, set={}, metric="global/pck_90x60", columns={"x": {}})
    assert "does not report the metric 'global/pck_90x60'; did you mean global/pck_80x60?" in error(
        check_metrics, grid, grid.cells, lambda cell: told
    )


def test_what_only_the_code_knows_is_asked_once_for_each_kind_of_run(tmp_path):
    grid = grid_of(tmp_path, metric="server/step", columns={"x": {}, "y": {"set": {"trainer.max_rounds": 3}}})
    asked = []

    def ask(cell):
        asked.append(cell.name)
        return ["round", "global/acc", "server/step"]

    check_metrics(grid, grid.cells, ask)
    assert asked == ["fedavg/x/0", "prox/x/0"]
    assert "does not report the metric 'server/step'" in error(
        check_metrics, grid, grid.cells, lambda cell: ["round", "train/task"]
    )
    check_metrics(grid)  # nobody to ask, so nothing is held against it


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"data": "ArrayFile", "data.init_args.path": "none.npz"},
            "fedavg/iid: none.npz does not exist; set data.path",
        ),
        ({"model.init_args.network": "smal_cnn"}, "fedavg/iid: network 'smal_cnn' is neither in lit_fed nor"),
        ({"data.init_args.num_clients": 2000}, "fedavg/iid: 1438 training samples cannot be shared among 2000 clients"),
    ],
    ids=str,
)
def test_data_and_models_that_cannot_be_made(settings, expected, tmp_path):
    rows = {"fedavg": {"configs": TINY["rows"]["fedavg"]["configs"]}}
    columns = {"iid": TINY["columns"]["iid"] | {"set": settings}}
    assert error(check_parts, grid_of(tmp_path, rows=rows, columns=columns).cells).startswith(expected)


def test_a_cell_is_the_same_by_the_names_of_its_classes(tmp_path: Path) -> None:
    def cell(path: str) -> Cell:
        participation = {"class_path": path, "init_args": {"count": 5}}
        config = {"trainer": {"participation": participation, "protocols": [{"class_path": path}]}}
        return Cell("row", "column", 0, (), config, tmp_path)

    here = cell("lit_fed.participation.UniformParticipation")
    assert here.fingerprint == cell("elsewhere.rooms.UniformParticipation").fingerprint
    assert here.fingerprint != cell("lit_fed.participation.WeightedParticipation").fingerprint


def test_a_cell_that_an_older_release_ran_is_set_aside_and_told_why(tmp_path: Path) -> None:
    cell = Cell("row", "column", 0, (), {"trainer": {"max_rounds": 1}}, tmp_path / "cell")
    (cell.folder / "lightning_logs").mkdir(parents=True)
    (cell.folder / "cell.json").write_text('{"fingerprint": "0123456789abcdef", "status": "done"}', encoding="utf-8")
    assert cell.changed
    assert not cell.done
    assert cell.change == "an older lit_fed ran it, which identified classes by their paths"
    cell.write_record(fingerprint="0123456789abcdef")
    assert cell.change == "the settings have changed"


def test_metrics_that_a_models_settings_add_are_known_without_a_run(tmp_path):
    """The first chooses the best round, as in a run; one that the settings do not add is refused."""
    scored = TINY["set"] | {"model.init_args.metrics": ["balanced_accuracy"]}
    grid = grid_of(tmp_path, set=scored, metric="global/balanced_accuracy")
    assert metric_names(grid.cells[0].config).monitor == "global/balanced_accuracy"
    assert metric_names(grid_of(tmp_path, "plain").cells[0].config).monitor == "global/acc"
    check_metrics(grid)
    told = error(check_metrics, grid_of(tmp_path, "other", set=scored, metric="global/auroc"))
    assert "does not report the metric 'global/auroc'" in told
