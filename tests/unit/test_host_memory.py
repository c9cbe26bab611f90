"""Memory of a container, as the kernel's files say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spottrain_runtime import host_memory

MIB = 1 << 20
MEMINFO = f"MemTotal: {4096 * 1024} kB\nMemAvailable: {1000 * 1024} kB\nHugePages_Total: 0\n"
SECOND = {"memory.max": 800 * MIB, "memory.current": 700 * MIB}
SECOND_STATISTICS = f"anon {300 * MIB}\nfile {400 * MIB}\nactive_file {100 * MIB}\ninactive_file {200 * MIB}\n"
FIRST = {"memory/memory.limit_in_bytes": 800 * MIB, "memory/memory.usage_in_bytes": 700 * MIB}
FIRST_STATISTICS = f"active_file 1\ntotal_active_file {100 * MIB}\ntotal_inactive_file {200 * MIB}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1000 MiB to spare."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    return tmp_path


def write(root: Path, files: dict[str, int | str]) -> None:
    for name, content in files.items():
        (root / "sys/fs/cgroup" / name).write_text(f"{content}\n")


def test_without_a_limit_the_machine_counts(root: Path) -> None:
    assert host_memory.free_bytes(root) == 1000 * MIB
    write(root, {"memory.max": "max", "memory.current": 5})
    assert host_memory.free_bytes(root) == 1000 * MIB
    write(root, {"memory/memory.limit_in_bytes": 9223372036854771712, "memory/memory.usage_in_bytes": 5})
    write(root, {"memory/memory.stat": FIRST_STATISTICS})
    assert host_memory.free_bytes(root) == 1000 * MIB


@pytest.mark.parametrize(
    ("files", "statistics"),
    [(SECOND, {"memory.stat": SECOND_STATISTICS}), (FIRST, {"memory/memory.stat": FIRST_STATISTICS})],
    ids=["cgroup v2", "cgroup v1"],
)
def test_a_container_has_what_its_limit_leaves_and_pages_of_files_can_be_dropped(
    root: Path, files: dict[str, int | str], statistics: dict[str, int | str]
) -> None:
    write(root, files)
    write(root, statistics)
    assert host_memory.total_bytes(root) == 800 * MIB
    assert host_memory.free_bytes(root) == 400 * MIB


def test_a_machine_may_have_less_than_the_container_is_allowed(root: Path) -> None:
    write(root, {"memory.max": 8000 * MIB, "memory.current": 100 * MIB, "memory.stat": "anon 1\n"})
    assert host_memory.free_bytes(root) == 1000 * MIB


def test_this_machine_has_some() -> None:
    assert 0 < host_memory.free_bytes() <= host_memory.total_bytes()
