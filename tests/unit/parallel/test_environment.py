"""Who started this process."""

from __future__ import annotations

import pytest

from megatron.core.parallel.environment import (
    LaunchEnvironment,
    errors_once_per_node,
    first_host,
    launch_environment,
    launched_world_size,
)
from megatron.errors import ConfigError
from tests.harness.sentences import check_sentence, expect_error

SLURM = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "123456",
}


def test_nobody() -> None:
    """Plain python is a world of one."""
    assert launch_environment({}) == LaunchEnvironment()
    assert launched_world_size({}) == 1


def test_torchrun() -> None:
    """torchrun's variables win over Slurm's: torchrun inside srun."""
    found = launch_environment(
        SLURM
        | {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
        }
    )
    assert found == LaunchEnvironment(3, 4, 1, 2, "a", 1)


@pytest.mark.parametrize(
    ("variables", "tells"),
    [
        ({}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, True),
        ({"RANK": "3", "LOCAL_RANK": "3"}, False),
        ({"RANK": "1"}, False),
        (SLURM, False),
        (SLURM | {"SLURM_LOCALID": "0"}, True),
    ],
)
def test_one_process_of_a_node_tells_what_all_found(variables: dict[str, str], tells: bool) -> None:
    """A wrong flag on 64 ranks would be 64 sentences; a file missing on one node only would be none."""
    with pytest.raises(ConfigError if tells else SystemExit) as caught, errors_once_per_node(variables):
        raise ConfigError("something is wrong")
    assert tells or caught.value.args == (2,)


@pytest.mark.parametrize("text", ["two", "0", "-1"])
def test_world_size_that_is_no_number_of_ranks(text: str) -> None:
    """A launcher's mistake is a sentence, too."""
    with expect_error(ConfigError, "WORLD_SIZE", f"'{text}'"):
        launched_world_size({"WORLD_SIZE": text})


def test_slurm_step() -> None:
    """srun without torchrun: rank 0 is on the step's first host, at a port of the job's own"""
    expected = LaunchEnvironment(9, 16, 1, 8, "gpu003", 23456, may_see_own_device_alone=True)
    assert launch_environment(SLURM) == expected
    assert launched_world_size(SLURM) == 16


def test_slurm_batch_script_is_not_a_step() -> None:
    """Plain python in an sbatch script or salloc shell sees the job's variables but is one process."""
    assert launch_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) == LaunchEnvironment()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("gpu[12-14,3],x", "gpu12"),
        ("n[01]-ib,m", "n01-ib"),
        ("c-0-[5,6]", "c-0-5"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    """Slurm's short form of a list of hosts."""
    assert first_host(nodes) == host


def test_contradictions() -> None:
    """Half a launcher is named, not guessed at."""
    with expect_error(ConfigError, "WORLD_SIZE", "4", "RANK"):
        launch_environment({"WORLD_SIZE": "4"})
    with expect_error(ConfigError, "4"):
        launch_environment({"WORLD_SIZE": "4", "RANK": "4"})
    with expect_error(ConfigError, "'[3]'", "MASTER_ADDR"):
        first_host("[3]")


def test_mpirun_is_one_run_of_many_ranks() -> None:
    """Processes of mpirun took themselves for runs of one rank each, and all wrote into the same folder."""
    env = {
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    found = launch_environment({**env, "MASTER_ADDR": "node0", "MASTER_PORT": "12803"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.master_address, found.master_port) == ("node0", 12803)
    assert launched_world_size(env) == 8
    with pytest.raises(ConfigError) as caught:
        launch_environment(env)
    check_sentence(str(caught.value), "8 processes", "MASTER_ADDR=HOST", "0")
    assert launch_environment({**env, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}).master_address == "127.0.0.1"
    assert launch_environment({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}).world_size == 1
