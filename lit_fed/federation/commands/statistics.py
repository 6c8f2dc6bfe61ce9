"""``lit-fed statistics``: count and describe the data of a federation before any training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lit_fed.checks import check_range
from lit_fed.command.command import Call
from lit_fed.command.endings import exit_reported
from lit_fed.command.reading.own import add_overwrite
from lit_fed.command.reading.parts import add_parts
from lit_fed.engine.storage.files import in_place_of, refuse_overwriting, write_text
from lit_fed.errors import ConfigError
from lit_fed.federation.commands.deployed import MadeData, ServersEnd, keys_of, make_data
from lit_fed.federation.ends import keep_private, log_line
from lit_fed.federation.node.withheld import Report
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.statistics.data_part import check_levels, data_part
from lit_fed.federation.statistics.federation import first_question, simulated, take_statistics
from lit_fed.federation.statistics.noise import card
from lit_fed.federation.statistics.over_nodes import ask_nodes, new_roster
from lit_fed.federation.statistics.picture import ENDINGS, draw
from lit_fed.federation.statistics.report import Statistics
from lit_fed.federation.statistics.site import Inquiry, SiteStatistics, columns_of
from lit_fed.federation.transport.serving import rpc_grid


@dataclass(frozen=True)
class _Options:
    """Options of the statistics.

    Args:
        bins: cells of a histogram
        least: smallest number of samples that a count may tell of
        ranges: least and largest value by column, such as {age: [0, 120]}; * for all others; null takes the extremes
        report: tell of each client, or only of all clients together
        output: file for data.normalize
        picture: file of a picture, .png or .svg
        write: new file .yaml of the data of a run, with scale, classes, levels and medians from the statistics
        server: address by which nodes know this server; null for a simulation
        answer_s: seconds within which all nodes must answer
    """

    bins: int = 20
    least: int = 1
    ranges: dict[str, Any] | None = None
    report: Report = "clients"
    output: str = "statistics.json"
    picture: str | None = None
    write: str | None = None
    server: str | None = None
    answer_s: float = 3600.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, of which the data are enough, and those of the statistics and of nodes."""
    parser.add_argument("-c", "--config", action="config", help="configuration of a run, or of its data alone")
    add_parts(parser)
    parser.add_class_arguments(_Options, as_group=False)
    parser.add_class_arguments(ServersEnd, as_group=False)
    add_overwrite(parser, "existing files")
    parser.add_class_arguments(Gathering, "gathering")


def run(call: Call) -> int:
    """Print the statistics, and write them to files."""
    settings = call.settings
    output, picture = Path(settings.output), None if settings.picture is None else Path(settings.picture)
    if output.suffix.lower() != ".json":
        raise ConfigError(f"--output is {settings.output!r}; name a file that ends in .json")
    if picture is not None and picture.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--picture is {settings.picture!r}; name a file that ends in {' or '.join(ENDINGS)}")
    private = output.with_name(f"{output.stem}_privacy.md")
    written = None if settings.write is None else Path(settings.write)
    refuse_overwriting([output, *(path for path in (picture, written) if path is not None)], settings.overwrite)
    check_range("--answer_s", settings.answer_s, above=0)
    made = make_data(call)
    if made.noise is not None:
        refuse_overwriting([private], settings.overwrite)
    question = first_question(columns_of(made.data), settings.bins, settings.least, settings.ranges, made.noise)
    if written is not None and (made.noise is not None or settings.least > 1):
        check_levels(made.config, made.data)
    found = _simulated(call, made, question) if settings.server is None else _deployed(call, made, question)
    if picture is not None:
        with in_place_of(picture) as temporary:
            draw(found).savefig(temporary, format=picture.suffix[1:].lower())
    if found.privacy is not None:
        write_text([card(found.privacy)], private)
    write_text([found.json()], output)
    print(found.text())
    print(f"\nwrote {output}; data.normalize: {output} normalises by these figures")
    if written is not None:
        write_text([data_part(made.config, made.data, found, output)], written)
        print(f"wrote {written}; lit-fed fit -c {written} takes these data")
    return 0


def _simulated(call: Call, made: MadeData, question: Inquiry) -> Statistics:
    made.data.prepare_data()
    made.data.setup("fit")
    return simulated(made.data, question, made.noise, call.settings.report == "clients", made.seed)


def _deployed(call: Call, made: MadeData, question: Inquiry) -> Statistics:
    """Ask nodes that were started with ``--statistics``."""
    settings, together = call.settings, call.settings.report == "aggregate"
    keep_private()
    security, node_keys = keys_of(settings)
    served = rpc_grid(settings.server, security, settings.most_bytes, settings.bind, node_keys)
    with exit_reported(), served as grid:
        roster = new_roster(grid, made.data, made.config, log_line, settings.most_bytes, node_keys)
        roster.gather(Gathering(**settings.gathering))

        def ask(asked: Inquiry) -> dict[str, SiteStatistics]:
            return ask_nodes(roster, made.data, asked, settings.answer_s, together, made.noise is None)

        return take_statistics(made.data, ask, question, made.noise, by_client=not together)
