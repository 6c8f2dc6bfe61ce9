"""What the paper profiles resolve to, beside what the papers say: ``paper_settings.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.studies.file.study import Place, read_study
from lit_fed.studies.running.cells import lay_out
from tests.support import ROOT

PAPERS = ROOT / "configs" / "papers"
ENTRIES = yaml.safe_load((Path(__file__).parent / "paper_settings.yaml").read_text("utf-8"))
TABLES = ("feddr_plus", "fedfrozen", "uwa")  # papers with a table of settings for all that they run


def path_of(study: str) -> Path:
    paper, name = study.split("/")
    return PAPERS / paper / "studies" / f"{name}.yaml"


def setting(config: Any, key: str) -> Any:
    """A setting by its dotted key without ``init_args``; a class by its name, one of a list by its class's."""
    for word in key.split("."):
        if isinstance(config, list):
            (config,) = (one for one in config if one["class_path"].rpartition(".")[2] == word)
        elif word in config:
            config = config[word]
        else:
            config = config["init_args"][word]
    if isinstance(config, Mapping) and "class_path" in config:
        return config["class_path"].rpartition(".")[2]
    return config


def cases() -> list[Any]:
    named = [(entry, place) for entry in ENTRIES for place in entry["places"]]
    return [pytest.param(e, p, id=f"{e['study'].split('/')[1]}-{e['profile']}-{p}") for e, p in named]


@pytest.mark.parametrize(("entry", "place"), cases())
def test_a_place_runs_with_what_the_paper_says(entry, place, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the files that a study names are relative to the working directory
    study = read_study(path_of(entry["study"]), entry["profile"])
    row, column = Place(*place.split("/"))
    alone = replace(study, rows={row: study.rows[row]}, columns={column: study.columns[column]}, seeds=study.seeds[:1])
    (cell,) = lay_out(alone, tmp_path).cells
    ours = {key: setting(cell.config, key) for key in entry["settings"]}
    assert ours == entry["settings"], entry["source"]


def test_every_paper_profile_is_compared():
    profiles = {
        (f"{path.parent.parent.name}/{path.stem}", profile)
        for paper in TABLES
        for path in (PAPERS / paper / "studies").glob("*.yaml")
        for profile in yaml.safe_load(path.read_text("utf-8"))["profiles"]
        if profile.startswith(("paper", "own_settings")) or paper == "fedfrozen"
    }
    compared = {(entry["study"], entry["profile"]) for entry in ENTRIES}
    own = ("pocket", "pretrained")
    ours = {("fedfrozen/fedfrozen_table1", profile) for profile in own}
    assert profiles - compared == ours
    assert compared <= profiles
