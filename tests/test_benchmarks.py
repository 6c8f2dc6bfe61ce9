"""Benchmarks run to their end: what they measure is for a machine that does nothing else."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.long


def ended(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def run(*words: str) -> str:
    finished = ended(*words)
    assert finished.returncode == 0 or re.search(r"(?m)^missed: ", finished.stderr), finished.stderr
    return finished.stdout


def test_two_populations():
    told = run("population.py", "--clients", "20", "200", "--cohort", "5", "--rounds", "2", "--repeats", "1")
    # 2,000 samples of 8 float32 and an int64 label, as many indices, and the 1,000 samples of the test set.
    arrays = re.search(r"data and partition arrays, MiB +([0-9.]+) +([0-9.]+)", told)
    assert arrays is not None
    at_least = (2000 * (8 * 4 + 8) + 1000 * (8 * 4 + 8)) / 2**20
    assert [round(float(number), 2) >= round(at_least, 2) for number in arrays.groups()] == [True, True]


@pytest.mark.parametrize("only", ["MobileNetV2", "MLP in groups"])
def test_bare_loop_and_ours_end_in_the_same_weights(only):
    assert "1 rounds, weights agree" in run("overhead.py", "--rounds", "1", "--only", only)


def test_the_leanest_loops_and_ours_end_in_the_same_weights():
    told = run("floor.py", "--seconds", "1", "--only", "logistic regression 60-10")
    assert "| logistic regression 60-10, vectorized to by hand | " in told
    assert re.search(r"(?m)^\| … beyond by hand, µs a client \| +\| +\| [0-9.]+ \| ≤ 70 ", told)
    assert "auto (vectorized) to the better" in told


def test_adapters_need_less_memory_than_full_fine_tuning():
    told = run("adapter_memory.py", "--depth", "1")
    full, lora = ([int(cell) for cell in re.findall(r"\| (\d+)", line)] for line in told.splitlines()[2:4])
    # Embedding and head 2·259·768, projections 4·768² and 3·768·2048, norms 3·768: 7,478,016 weights of 16 bytes.
    # Adapters 8·(4·1536 + 3·2816) = 116,736 of 16 bytes, and the weights of 4.
    assert (full[0], lora[0]) == (114, 30)
    assert all(less < more for less, more in zip(lora, full, strict=True))
    assert all(min(row[1:]) > row[0] for row in (full, lora))


def test_raf_costs_its_lower_resolutions():
    told = run("raf.py", "--networks", "pose_cnn", "--repeats", "1", "--steps", "1")
    rows = re.findall(r"(?m)^\| `pose_cnn` \| \S+ \| (\w+) \| ([0-9,]+) \| ([0-9.]+) \| \d+ \|$", told)
    # 64·48 + 48·36 + 32·24, 48·36 + 32·24, and nothing below the lowest.
    seen = [
        ("FedAvg", "3,072"),
        ("RAF", "5,568"),
        ("FedAvg", "1,728"),
        ("RAF", "2,496"),
        ("FedAvg", "768"),
        ("RAF", "768"),
    ]
    assert [row[:2] for row in rows] == seen
    kept = [float(row[2]) for row in rows]
    assert kept[1] > kept[0] > kept[2]
    assert kept[4] == kept[5]


def test_a_studys_seeds_are_told_with_what_all_of_them_take():
    told = run("studies.py", "uwa_homogeneous:pocket")
    # Its 40 cells are four a seed, so one seed runs, of ten.
    row = re.search(r"(?m)^\| `uwa_homogeneous` \| pocket \| 1 of 10 \| (\d+) \| ([0-9.]+) \| [0-9.]+ \|$", told)
    assert row is not None, told
    took, whole = float(row[1]) / 60, float(row[2])
    assert took < whole < 10 * took  # the start is counted once


@pytest.mark.skipif((ROOT / "small_vit").exists(), reason="its first study has the weights that it is to lack")
def test_a_study_that_fails_is_told_and_the_next_is_timed():
    finished = ended("studies.py", "fedfrozen_table1:pretrained", "uwa_homogeneous:pocket")
    assert finished.returncode == 1
    assert "| `uwa_homogeneous` | pocket | 1 of 10 |" in finished.stdout
    assert "fedfrozen_table1.yaml --profile pretrained" in finished.stderr
    assert finished.stderr.splitlines()[-1] == "1 of 2 studies could not be timed"


def test_peers_that_shuffle_differently_end_in_the_same_weights():
    loops = "lit_fed, sequential", "lit_fed, vectorized", "bare loop"
    told = run("peers.py", "--check", "--only", "logistic regression", "--loops", *loops)
    assert re.findall(r"(?m)^(.+), logistic regression: the weights of lit_fed, sequential to ", told) == list(loops)


def test_what_a_borrowed_gpu_is_to_answer_is_tried_without_one(tmp_path):
    told = run("card.py", "--dry", "--out", str(tmp_path))
    rows = re.findall(r"(?m)^\| (\w+) \| \d+ \| (\S+) \| (.*) \|$", told)
    assert [row[:2] for row in rows] == [(part, "0") for part in ("tests", "graphs", "gpu", "feddr_plus")]
    assert re.search(r"\d+ passed", rows[0][2])  # the tests themselves ran, none was skipped
    assert "skipped" not in rows[0][2]
    cells = re.findall(r"(?m)\b(ce|dr|dr\+)/global/[012]\b", (tmp_path / "feddr_plus.txt").read_text(encoding="utf-8"))
    assert len(cells) == 9


def test_a_disturbed_federation_is_the_simulation_and_its_logs_are_whole(tmp_path):
    told = run("federation_faults.py", str(tmp_path), "--kills", "3", "--stops", "0", "--links", "1", "--rounds", "100")
    assert re.search(
        r"(?m)^(3 of kill, 1 of link|1 of link, 3 of kill); [1-9]\d* rounds finished, [1-9]\d* states", told
    )
    assert told.count("wrong: nothing") == 1
    assert re.findall(r"lit-fed log of (\w+): exit status 0", told) == ["server", "node_0", "node_1"]


def test_the_memory_of_a_federation_is_measured_where_its_weights_are_the_simulations():
    told = run("federation_memory.py", "--width", "8", "--runs", "1")
    assert re.search(r"fit [\d,]+ MiB, server [\d,]+ MiB, node 0 [\d,]+ MiB, node 1 [\d,]+ MiB; weights equal", told)
