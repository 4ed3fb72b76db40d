"""Every file operation of a save, a resume, the record, save_model and an export fails once, or the process is killed
there. What was saved before is intact, what is said to be saved is, another process goes on, nothing is left behind."""

import faulty_io
import pytest

ONE = [name for name, (*_, processes) in faulty_io.SCENARIOS.items() if processes == 1]
MACHINES = list(faulty_io.MACHINES)
TWO = [name for name in faulty_io.SCENARIOS if name not in ONE]


def check(folder, scenarios, every):
    rows = faulty_io.campaign(folder, scenarios, every)
    if rows is None:
        pytest.skip("no C compiler: the preloaded library cannot be built")
    assert {row["scenario"] for row in rows} == set(scenarios)
    assert not (wrong := [line for row in rows for line in row["wrong"]]), "\n".join(wrong)


def test_a_sample_of_faults(tmp_path):
    check(tmp_path, ["save"], 50)


@pytest.mark.slow
def test_a_sample_of_faults_of_everything(tmp_path):
    check(tmp_path, ONE, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE)
def test_every_operation_fails_once(tmp_path, name):
    check(tmp_path, [name], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_operations_of_two_processes(tmp_path, name):
    """The other process ends, too."""
    check(tmp_path, [name], 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_kills_and_full_disks_of_one_of_two_machines(tmp_path, name):
    if not faulty_io.may_mount():
        pytest.skip("a disk for each process needs the right to mount")
    check(tmp_path, [name], 12)
