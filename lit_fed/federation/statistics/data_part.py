"""The data of a run with what statistics say of them: scale, classes, features, levels and medians."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lit_fed.data import FederatedDataModule
from lit_fed.errors import ConfigError
from lit_fed.federation.statistics.report import Statistics
from lit_fed.federation.statistics.site import levels_of
from lit_fed.yaml_text import read_yaml


def check_levels(config: str, data: FederatedDataModule) -> None:
    """Refuse to write levels that no setting names, as each may be a single sample's."""
    given = read_yaml(config)["data"]["init_args"].get("levels") or {}
    if found := sorted(levels_of(data).keys() - given):
        raise ConfigError(
            f"--write tells the levels of {found[0]!r}, which --least and trainer.privacy protect; give data.levels"
        )


def data_part(config: str, data: FederatedDataModule, found: Statistics, output: Path) -> str:
    """The part ``data`` of a configuration in YAML, in which statistics fill what is not given.

    Args:
        config: The resolved configuration.
        data: The population.
        found: Its statistics.
        output: Their file.
    """
    part, whole = read_yaml(config)["data"], found.as_dict()["all"]
    settings: dict[str, Any] = part["init_args"]
    names = found.class_names if found.privacy is None else None
    told = {"features": getattr(data, "feature_names", None), "class_names": names}
    if settings.get("mean") is None and settings.get("standardise") is not False:
        told["normalize"] = str(output)
    settings |= {key: value for key, value in told.items() if key in settings and settings[key] is None}
    if "impute" in settings:
        given = settings["impute"] if isinstance(settings["impute"], dict) else {}
        gaps = getattr(data, "gaps", [])
        if found.privacy is not None or found.question.least > 1:  # a gap may be a single sample's: all numbers
            gaps = [column["name"] for column in whole["columns"] if column["role"] == "input"]
        medians = {name: _median(name, whole["columns"]) for name in gaps if name not in given}
        settings |= {"levels": levels_of(data) or None, "impute": given | medians or None}
    classes = "" if whole["classes"] is None else f", {found.class_counts(whole['classes'])}"
    head = f"# {whole['samples']} training samples{classes}\n"
    return head + yaml.safe_dump({"data": part}, sort_keys=False, allow_unicode=True)


def _median(name: str, columns: list[dict[str, Any]]) -> float:
    (quantiles,) = [column["quantiles"] for column in columns if column["name"] == name and column["role"] == "input"]
    (median,) = [bound["value"] for bound in quantiles if bound["q"] == 0.5]
    if median is None:
        raise ConfigError(f"--write: the median of {name!r} is withheld or out of --ranges; give data.impute.{name}")
    return float(median)
