"""Options by which clients are chosen: a text stays what it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lit_fed.command.reading.own import add_clients, add_overwrite, chosen
from lit_fed.errors import ConfigError


def parsed(*words: str) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    add_clients(parser, "who")
    add_overwrite(parser, "it")
    return parser.parse_args([*words])


def population(*names: str, count: int = 0) -> Any:
    return SimpleNamespace(num_clients=count or len(names), client_names=[*names] or None)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--client", "01"], [2]),
        (["--client=1"], [3]),
        (["--client", "[01, 1]"], [2, 3]),
        (["--client", "null"], [1]),
        (["--client", "[null, '0', \"a, b\"]"], [1, 0, 4]),
        (["--client_position", "1"], [1]),
        (["--client_position", "[4, 0]"], [4, 0]),
        ([], None),
    ],
)
def test_names_on_the_command_line_stay_texts(words: list[str], found: Any) -> None:
    assert chosen(population("0", "null", "01", "1", "a, b"), parsed(*words)) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--client", "[]"], "--client is an empty list; name at least one client"),
        (
            ["--client", "2"],
            "--client: there is no client named '2'; clients are 0, 01; --client_position takes positions",
        ),
        (["--client_position", "2"], "--client_position: there is no client 2; clients are 0 to 1"),
        (["--client", "[[1]]"], r"expected a name, or a list of names in brackets, not [[1]]"),
        (["--client", "[{a: b}]"], "expected a name, or a list of names in brackets, not [{a: b}]"),
        (["--client", "[a: b: c]"], "expected a name, or a list of names in brackets, not [a: b: c]"),
    ],
)
def test_who_is_not_there_is_said(words: list[str], message: str) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011  # the parser's or ours
        chosen(population("0", "01"), parsed(*words))
    assert message in str(error.value)


def test_clients_without_names_are_called_by_numbers() -> None:
    assert chosen(population(count=20), parsed("--client", "[3, 19]")) == [3, 19]
    with pytest.raises(
        ConfigError, match=r"no client named '03'; clients have no names here, and are numbered 0 to 19"
    ):
        chosen(population(count=20), parsed("--client", "03"))


def test_a_lone_word_lets_a_file_be_replaced() -> None:
    assert [parsed(*words).overwrite for words in ([], ["--overwrite"], ["--overwrite", "false"])] == [
        False,
        True,
        False,
    ]
