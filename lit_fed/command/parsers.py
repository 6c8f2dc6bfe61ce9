"""The parsers of a command line: that of all commands, and each command's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_fed.command.table import COMMANDS
from lit_fed.parsing import Parser


def make_parsers(
    words: Sequence[str],
    has_options: Callable[[str], bool],
    add_trainers: Callable[[Parser, str], None] = lambda _parser, _name: None,
) -> tuple[Parser, dict[str, Parser]]:
    """Parser of all commands, which prints help and configurations, and each command's own.

    Args:
        words: The command line.
        has_options: Whether a command gets its options: only the one that is called, so that others cost no import.
        add_trainers: Adds the options of a command of the trainer's, by its name.
    """
    from lit_fed import __version__

    version = {"version": __version__, "dump_header": [f"lit_fed=={__version__}"]}
    title = "Federated learning for PyTorch Lightning"
    whole = Parser(prog="lit-fed", description=title, exit_on_error=False, **version)
    parsers, actions = dict[str, Parser](), whole.add_subcommands()
    for name, line in COMMANDS.items():
        wanted, description, room = has_options(name), line.help, line.room_of(words)
        if wanted and line.at_home and not room:
            description += f" On a node: --state_dir DIR, whose options are in lit-fed {name} --state_dir DIR --help."
        parsers[name] = made = Parser(description=description, exit_on_error=False, **({} if room else version))
        if wanted and room:
            line.load(words).add_arguments(made)
        elif wanted:
            add_trainers(made, name)
        actions.add_subcommand(name, made, help=line.help)
    return whole, parsers
