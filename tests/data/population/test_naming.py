"""Who is meant by a name, and who by a position."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.data.population.naming import Keys, called, clients_of, in_order
from lit_fed.errors import ConfigError, errors_name_options

NAMES = st.text() | st.from_regex(r"[+-]?0{0,3}[0-9]{1,2}", fullmatch=True)
KEYS = Keys("--client", "--client_position")


class Population(NamedTuple):
    num_clients: int
    client_names: list[str] | None = None


@given(st.lists(NAMES, min_size=1, unique=True), st.data())
def test_a_name_wins_over_a_position(names: list[str], data: Any) -> None:
    name = data.draw(st.sampled_from(names))
    population = Population(len(names), names)
    (found,) = clients_of(population, KEYS, [name]) or []
    assert names[found] == called(population, found) == name
    (at,) = clients_of(population, KEYS, positions=[found]) or []
    assert at == found


@given(st.lists(NAMES, min_size=1, unique=True), st.randoms())
def test_the_order_of_names_follows_from_the_names(names: list[str], shuffle: Any) -> None:
    shuffled = shuffle.sample(names, len(names))
    assert in_order(shuffled) == in_order(names)


def test_numbers_stand_by_size_and_then_by_the_alphabet() -> None:
    assert in_order([10, "9", "1", "01", "001"]) == ["001", "01", "1", "9", "10"]
    assert in_order(["10", "9", "x"]) == ["10", "9", "x"]
    assert in_order(["9" * 5000, "1"]) == ["1", "9" * 5000]


def test_clients_without_names_are_called_by_their_numbers() -> None:
    assert clients_of(Population(4), KEYS, ["3", 0]) == [3, 0]
    assert clients_of(Population(4), KEYS, None, [2]) == [2]
    assert clients_of(Population(4), KEYS, []) == []
    assert clients_of(Population(4), KEYS) is None
    assert called(Population(4), 3) == "3"


NUMBERED = Population(3, ["01", "02", "03"])


@pytest.mark.parametrize(
    ("population", "names", "positions", "message"),
    [
        (
            NUMBERED,
            ["1"],
            None,
            "--client: there is no client named '1'; clients are 01, 02, 03; --client_position takes",
        ),
        (NUMBERED, ["0"], None, "there is no client named '0'"),
        (NUMBERED, [1], None, "--client 1 is a number, and these clients have names; write a name in quotes, or give "),
        (NUMBERED, None, [3], "--client_position: there is no client 3; clients are 0 to 2"),
        (NUMBERED, None, ["01"], "--client_position is '01'; it must be a whole number"),
        (NUMBERED, None, [True], "--client_position is True; it must be a whole number"),
        (Population(2, ["berlin", "ulm"]), ["berln"], None, "no client named 'berln'; did you mean berlin?"),
        (Population(2, ["a", "a"]), ["a"], None, "--client: 2 clients are named 'a'; give --client_position"),
        (Population(3), ["3"], None, "--client: there is no client 3; clients are 0 to 2"),
        (Population(3), ["-1"], None, "--client: there is no client -1; clients are 0 to 2"),
        (Population(3), ["01"], None, "no client named '01'; clients have no names here, and are numbered 0 to 2"),
        (Population(3), ["٢"], None, "no client named '٢'; clients have no names here, and are numbered 0 to 2"),
        (Population(3), [1.0], None, "no client named 1.0; clients have no names"),
        (Population(3), [True], None, "no client named True; clients have no names"),
    ],
)
def test_nobody_is_taken_for_another(population: Any, names: Any, positions: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error, errors_name_options():
        clients_of(population, KEYS, names, positions)
    assert message in str(error.value)
