"""The lowest of all memory limits applies."""

import pytest

from tierfs.host.slab.memory import memory_available, memory_limit

GIB = 1 << 30
TOTAL = 64 * GIB


@pytest.fixture
def machine(tmp_path):
    """A function that writes the kernel's files and returns the directory that has them."""

    def write(meminfo, membership, files):
        files = {f"sys/fs/cgroup/{name}": value for name, value in files.items()}
        for name, value in {"proc/meminfo": meminfo, "proc/self/cgroup": membership, **files}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        return tmp_path

    return write


@pytest.fixture
def limit(machine):
    def read(membership, limits, meminfo=f"MemFree: 1 kB\nMemTotal:       {TOTAL // 1024} kB\nSwapTotal: 0 kB\n"):
        return memory_limit(machine(meminfo, membership, limits))

    return read


def test_without_control_groups_it_is_the_machine_s_memory(limit):
    assert limit("", {}) == TOTAL


def test_a_group_without_a_limit_has_none(limit):
    assert limit("0::/user/job\n", {"user/job/memory.max": "max", "memory.max": "max"}) == TOTAL


def test_a_limit_above_the_machine_s_memory_changes_nothing(limit):
    assert limit("0::/\n", {"memory.max": 2 * TOTAL}) == TOTAL


@pytest.mark.parametrize("bounded", ["user/job/memory.max", "user/memory.max", "memory.max"])
def test_the_group_and_each_one_above_it_count(limit, bounded):
    limits = {"user/job/memory.max": 3 * GIB, "user/memory.max": 4 * GIB, "memory.max": "max"}
    assert limit("0::/user/job\n", limits | {bounded: GIB}) == GIB


def test_other_groups_do_not_count(limit):
    assert limit("0::/user/job\n", {"user/other/memory.max": GIB, "user/job/below/memory.max": GIB}) == TOTAL


@pytest.mark.parametrize("bounded", ["job/memory.limit_in_bytes", "memory.limit_in_bytes"])
def test_version_1_counts(limit, bounded):
    membership = "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/other\n"
    limits = {"job/memory.limit_in_bytes": 9223372036854771712, "memory.limit_in_bytes": 9223372036854771712}
    limits[bounded] = 2 * GIB
    assert limit(membership, {f"memory/{name}": value for name, value in limits.items()}) == 2 * GIB


def test_both_versions_side_by_side_count(limit):
    limits = {"memory/job/memory.limit_in_bytes": 2 * GIB, "unified/job/memory.max": GIB}
    assert limit("4:memory:/job\n0::/job\n", limits) == GIB


def test_in_a_container_the_mounted_group_counts(limit):
    assert limit("4:memory:/docker/0123\n", {"memory/memory.limit_in_bytes": GIB}) == GIB
    assert limit("0::/../../job\n", {"memory.max": GIB}) == GIB


def test_limits_outside_mounted_groups_do_not_count(limit):
    assert limit("0::/../../job\n", {"../memory.max": GIB, "job/memory.max": 2 * GIB}) == 2 * GIB


def test_a_group_of_another_controller_does_not_count(limit):
    assert limit("1:name=systemd:/memory\n", {"memory/memory/memory.limit_in_bytes": GIB}) == TOTAL


def test_without_a_readable_total_the_system_is_asked(limit):
    assert limit("", {}, meminfo="nothing of use") > 0


def test_this_machine_has_a_limit():
    assert memory_limit() > 16 << 20


# -- available memory --------------------------------------------------------------------------------------------------


@pytest.fixture
def available(machine):
    def read(files, meminfo="MemTotal: 8388608 kB\nMemAvailable:  4194304 kB\n"):
        return memory_available(machine(meminfo, "0::/job\n3:memory:/job\n", files))

    return read


def test_available_memory_may_be_taken(available):
    assert available({}) == 4 * GIB


def test_a_group_leaves_its_limit_less_what_it_uses(available):
    assert available({"job/memory.max": 3 * GIB, "job/memory.current": 2 * GIB}) == GIB


def test_cached_pages_that_nobody_looks_at_are_as_good_as_free(available):
    stat = f"anon 5\ninactive_file {GIB}\nactive_file 7"
    files = {"job/memory.max": 3 * GIB, "job/memory.current": 2 * GIB, "job/memory.stat": stat}
    assert available(files) == 2 * GIB


def test_version_1_of_control_groups_counts_as_well(available):
    files = {"memory/job/memory.limit_in_bytes": 2 * GIB, "memory/job/memory.usage_in_bytes": 2 * GIB + 5}
    assert available(files) == 0


def test_a_group_without_a_limit_leaves_everything(available):
    assert available({"job/memory.max": "max", "job/memory.current": GIB}) == 4 * GIB
