"""Keys of private runs: noise that repeats where the release is the same, and nowhere else."""

import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.errors import ConfigError
from lit_fed.privacy.keys import RunKey

releases = st.tuples(st.integers(0, 50), st.lists(st.integers(0, 20), max_size=5, unique=True), st.text(max_size=5))


@settings(max_examples=50)
@given(releases, releases)
def test_noise_is_the_same_for_the_same_release_and_for_no_other(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    key = RunKey.of_seed(1)
    first, second = (key.noise(key.name(*release), 3).tolist() for release in (one, other))
    assert (first == second) == (one == other)


def test_noise_is_standard_normal_within_its_own_standard_error() -> None:
    key, count = RunKey.of_seed(3), 200_000
    noise = key.noise(key.name(0, [1, 2], ""), count)
    # The variance of a sample variance of n normal numbers is 2/n, that of the mean 1/n; four standard errors.
    assert abs(noise.mean()) < 4 / count**0.5
    assert abs(noise.var() - 1) < 4 * (2 / count) ** 0.5


def test_two_runs_share_no_noise(tmp_path: Path) -> None:
    one, other = (RunKey.of_file(tmp_path / name) for name in ("a.key", "b.key"))
    name = one.name(0, [1], "")
    assert name != other.name(0, [1], "")
    assert not np.array_equal(one.noise(name, 4), other.noise(name, 4))


def test_a_key_is_made_for_its_owner_alone_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "run.key"
    made = RunKey.of_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.record("0" * 32)
    made.record("0" * 32)
    again = RunKey.of_file(path)
    assert list(again.releases) == ["0" * 32]
    assert again.seed("cohort") == made.seed("cohort")


def test_a_release_that_was_cut_off_while_written_was_not_made(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    RunKey.of_file(path).record("0" * 32)
    with open(path, "a") as file:
        file.write("1" * 7)
    again = RunKey.of_file(path)
    assert list(again.releases) == ["0" * 32]
    again.record("2" * 32)
    assert list(RunKey.of_file(path).releases) == ["0" * 32, "2" * 32]


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ('{"key": "00"}\n', 0o600, "holds no key"),
        ("hello\n", 0o600, "holds no key"),
        ("", 0o600, "holds no key"),
        ("ä", 0o600, "holds no key"),
        ('{"key": "' + "0" * 64 + '"}\nxyz\n', 0o600, "damaged record"),
        ('{"key": "' + "0" * 64 + '"}\n', 0o644, "can be read by others"),
    ],
)
def test_a_file_that_holds_no_key_or_that_others_read_is_refused(
    tmp_path: Path, content: str, mode: int, text: str
) -> None:
    path = tmp_path / "run.key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=text):
        RunKey.of_file(path)
