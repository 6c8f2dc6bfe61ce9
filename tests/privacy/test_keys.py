"""Keys of private runs: noise that repeats where the release is the same, and nowhere else."""

import math
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.privacy.keys import RunKey, conceal, reveal
from lit_fed.seeding import SECRET, key_stream

WORD = "0123456789abcdef" * 2
SUM = np.array([1.0, -2.0])
releases = st.tuples(
    st.integers(0, 50),
    st.lists(st.integers(0, 20), max_size=5, unique=True),
    st.lists(st.floats(-4, 4), min_size=2, max_size=2),
)


def noise(key: RunKey, release: tuple, count: int = 3) -> list[float]:  # type: ignore[type-arg]
    round_idx, delivered, total = release
    drawn: list[float] = key.noise(key.release(round_idx, delivered, np.array(total)), count).tolist()
    return drawn


@settings(max_examples=50)
@given(releases, releases)
def test_noise_is_the_same_for_the_same_release_and_for_no_other(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    key = RunKey(b"k" * 32, Path("run.key"))
    alike = one[:2] == other[:2] and np.array(one[2]).tobytes() == np.array(other[2]).tobytes()
    assert (noise(key, one) == noise(key, other)) == alike


def test_a_sum_that_differs_in_its_last_bit_gets_other_noise() -> None:
    # With the same noise the difference of two releases would be that of two sums, bare.
    key = RunKey(b"k" * 32, Path("run.key"))
    assert noise(key, (0, [1], [1.0])) != noise(key, (0, [1], [float(np.nextafter(1.0, 2.0))]))


def test_a_simulations_noise_is_the_same_whatever_the_sum() -> None:
    key = RunKey.of_seed(1)
    assert noise(key, (0, [1], [1.0])) == noise(key, (0, [1], [2.0]))
    assert noise(key, (0, [1], [1.0])) != noise(key, (0, [1, 2], [1.0]))
    assert noise(key, (0, [1], [1.0])) != noise(key, (1, [1], [1.0]))


def test_noise_is_standard_normal_within_its_own_standard_error() -> None:
    count = 200_000
    drawn = np.array(noise(RunKey.of_seed(3), (0, [1, 2], [0.0]), count))
    # The variance of a sample variance of n normal numbers is 2/n, that of the mean 1/n; four standard errors.
    assert abs(drawn.mean()) < 4 / count**0.5
    assert abs(drawn.var() - 1) < 4 * (2 / count) ** 0.5


def test_under_a_key_noise_is_the_quantile_of_a_word_of_chacha20() -> None:
    key, count = RunKey(b"k" * 32, Path("run.key")), 2000
    words = key_stream(key._digest("noise", WORD))(count)
    for word, drawn in zip(words.tolist(), key.noise(WORD, count).tolist(), strict=True):
        # P(Z < -|z|) = erfc(|z| / √2) / 2
        assert math.erfc(abs(drawn) / math.sqrt(2)) / 2 == pytest.approx(((word >> 1) + 0.5) / 2**64, rel=1e-12)
        assert (drawn > 0) == (word % 2 == 0)


def test_noise_under_a_key_has_the_moments_of_a_normal_distribution() -> None:
    count = 1_000_000
    drawn = RunKey(b"k" * 32, Path("run.key")).noise(WORD, count)
    # Moments 0, 1, 0, 3, whose estimates have the variances 1, 2, 15, 96 over n; four standard errors.
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], 1):
        assert abs(float((drawn**power).mean()) - moment) < 4 * (variance / count) ** 0.5


def test_batches_and_cohorts_of_a_key_are_chacha20s_and_a_simulations_are_pcg64s() -> None:
    key, simulated = RunKey(b"k" * 32, Path("run.key")), RunKey.of_seed(1)
    words = key_stream(key._digest("uniform", "batch", 1))(100)
    assert key.uniform(100, "batch", 1).tolist() == [(word >> 11) / 2**53 for word in words.tolist()]
    assert key.seed("cohort") >= SECRET > simulated.seed("cohort")
    plain = np.random.Generator(np.random.PCG64(simulated.seed("batch", 1))).random(100)
    assert simulated.uniform(100, "batch", 1).tolist() == plain.tolist()


def test_what_a_key_conceals_only_that_key_reveals() -> None:
    one, other = RunKey(b"k" * 32, Path("run.key")), RunKey(b"l" * 32, Path("run.key"))
    numbers = np.arange(6)
    concealed = conceal(one, numbers)
    assert len(concealed) == 8
    assert not set(concealed.tolist()) & set(range(6))
    assert reveal(one, concealed).tolist() == numbers.tolist()
    for key, found in ((other, concealed), (one, concealed + np.eye(8, dtype=np.int64)[7])):
        with pytest.raises(CheckpointError, match=r"the account of trainer\.privacy in the checkpoint is damaged"):
            reveal(key, found)
    simulated = RunKey.of_seed(1)
    assert conceal(simulated, numbers).tolist() == [0, 0, *range(6)]
    assert reveal(simulated, conceal(simulated, numbers)).tolist() == numbers.tolist()


def test_two_runs_share_no_noise(tmp_path: Path) -> None:
    one, other = (RunKey.of_file(tmp_path / name) for name in ("a.key", "b.key"))
    assert one.name != other.name
    assert one.release(0, [1], SUM) != other.release(0, [1], SUM)
    assert one.noise(WORD, 4).tolist() != other.noise(WORD, 4).tolist()


def test_a_key_is_made_for_its_owner_alone_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "run.key"
    made = RunKey.of_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.record(WORD, 3)
    again = RunKey.of_file(path)
    assert again.releases == {WORD: 3}
    assert again.name == made.name
    assert again.seed("cohort") == made.seed("cohort")


def test_a_release_that_was_cut_off_while_written_was_not_made(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    RunKey.of_file(path).record(WORD, 0)
    with open(path, "a") as file:
        file.write("1 " + "1" * 7)
    again = RunKey.of_file(path)
    assert again.releases == {WORD: 0}
    again.record("2" * 32, 1)
    assert RunKey.of_file(path).releases == {WORD: 0, "2" * 32: 1}


def test_two_runs_that_write_one_key_at_a_time_are_refused(tmp_path: Path) -> None:
    one, other = (RunKey.of_file(tmp_path / "run.key") for _ in range(2))
    one.record(WORD, 0)
    with pytest.raises(ConfigError, match=r"run\.key is written by another run too; give each run another file"):
        other.record("1" * 32, 0)


def test_a_link_to_a_key_is_the_key(tmp_path: Path) -> None:
    made = RunKey.of_file(tmp_path / "run.key")
    (tmp_path / "link").symlink_to(tmp_path / "run.key")
    assert RunKey.of_file(tmp_path / "link").name == made.name


def test_a_key_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file/run.key", "dangling"):
        with pytest.raises(ConfigError, match=r"cannot be made: .*; name a file in a folder of yours"):
            RunKey.of_file(tmp_path / name)
    with pytest.raises(ConfigError, match="is not a file"):
        RunKey.of_file(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_on_a_full_disk_nothing_is_released(tmp_path: Path) -> None:
    key = RunKey(b"k" * 32, Path("/dev/full"))
    with pytest.raises(ConfigError, match=r"/dev/full cannot be written: No space.*nothing of round 4 was released"):
        key.record(WORD, 4)


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ('{"key": "00"}\n', 0o600, "holds no key"),
        ("hello\n", 0o600, "holds no key"),
        ("", 0o600, "holds no key"),
        ("ä", 0o600, "holds no key"),
        ('{"key": "' + "0" * 64 + '"}\nxyz\n', 0o600, "damaged record"),
        ('{"key": "' + "0" * 64 + '"}\nx ' + "0" * 32 + "\n", 0o600, "damaged record"),
        ('["key"]\n', 0o600, "holds no key"),
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
