"""The control groups of this process, and the number of processors that the groups and the CPU affinity allow."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
THREADS = "OMP_NUM_THREADS"


def cpu_count() -> int:
    """Returns the number of threads to use: OMP_NUM_THREADS, else as many as affinity and control groups allow."""
    named = os.environ.get(THREADS, "")
    if named.isdigit() and int(named):
        return int(named)
    return max(1, min([_affinity(), *map(int, _quotas())]))


def limit_threads() -> None:
    """Limits libraries to as many threads as a quota allows; by default, libraries consider only the affinity."""
    if not os.environ.get(THREADS) and cpu_count() < _affinity():
        os.environ[THREADS] = str(cpu_count())


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # On a Mac, only the fast cores count: they would have to wait for the slow cores' shares of each matmul.
    fast = sysctl("hw.perflevel0.logicalcpu")
    return (int.from_bytes(fast, sys.byteorder) if fast else os.cpu_count()) or 1


def sysctl(name: str) -> bytes | None:
    """Returns a value that macOS reports about the machine; None if it reports none, and on other systems."""
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    size = ctypes.c_size_t()
    if read is None or read(name.encode(), None, ctypes.byref(size), None, 0):
        return None
    value = ctypes.create_string_buffer(size.value)
    if read(name.encode(), value, ctypes.byref(size), None, 0):
        return None
    return value.raw[: size.value]


def _quotas() -> Iterator[float]:
    """Yields the numbers of processors that this process's control groups (version 1 or 2) and their parents allow."""
    for folder in control_groups("cpu"):
        yield from _quota(folder)


def control_groups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups, and of their parents, that may limit a resource.

    controller: the name of the resource in version 1 of control groups.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controllers
        # In a container, the group has the name that it has on the host, but its files are at the root.
        group = root / place.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield folder


def _quota(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):  # no such file, or "max": no limit
        quota, period = map(int, (folder / "cpu.max").read_text().split())
        yield quota / period
    with suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        if quota > 0:
            yield quota / period
