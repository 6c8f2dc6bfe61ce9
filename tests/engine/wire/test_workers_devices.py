"""Who starts the processes of a run: torchrun and SLURM say how many there are, and settings must agree."""

from __future__ import annotations

import pytest

from lit_fed.engine.wire.workers import Devices
from lit_fed.errors import ConfigError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


@pytest.fixture
def by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("by_torchrun")
@pytest.mark.parametrize("devices", [1, "1"])
def test_two_processes_for_one_device_would_be_two_runs(devices: object) -> None:
    with pytest.raises(
        ConfigError, match=r"torchrun started 2 processes, but .*; set trainer.devices to 2, or to auto"
    ):
        Devices("cpu", devices).fabric()  # type: ignore[arg-type]


@pytest.mark.usefixtures("by_torchrun")
@pytest.mark.parametrize("devices", [2, "auto"])
def test_as_many_as_were_started_are_taken(devices: object) -> None:
    assert Devices("cpu", devices).fabric().strategy.num_processes == 2  # type: ignore[arg-type,attr-defined]


def test_a_seed_a_task_of_one_srun_is_told_where_the_right_form_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    # `srun -n 4 lit-fed fit … --trainer.seed $SLURM_PROCID`, seen by its second task
    for name, value in {
        "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "lit-fed", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    advice = r"; for a run per seed start each by itself, see docs/devices\.md$"
    with pytest.raises(ConfigError, match=r"^SLURM_NTASKS is 4; start one run of 4 .* --ntasks-per-node" + advice):
        Devices("cpu", 1).fabric()
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    with pytest.raises(ConfigError, match=r"^SLURM started 4 processes, but trainer\.devices 1 .*" + advice):
        Devices("cpu", 1).fabric()
    # a step of one task, as docs/devices.md has it
    for name, value in {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert getattr(Devices("cpu", 1).fabric().strategy, "num_processes", 1) == 1


def test_several_machines_need_somebody_who_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"trainer.num_nodes is 2, but .* start it by torchrun or SLURM"):
        Devices("cpu", 1, num_nodes=2).fabric()
