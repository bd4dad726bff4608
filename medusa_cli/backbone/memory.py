"""Memory of the device under CUDA, elsewhere of the process and its machine: the most held at once, what is free."""

import os
import resource
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SYSTEM, _CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken: of the device under CUDA, else of this machine or its container's allowance."""
    if device.type == "cuda":
        # What torch holds for later is free as well.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = 1024 * _numbers(_SYSTEM)["MemAvailable"] if "MemAvailable" in _numbers(_SYSTEM) else whole // 2
    try:
        allowed = int((_CONTAINER / "memory.max").read_text())
        taken = int((_CONTAINER / "memory.current").read_text())
    except (OSError, ValueError):  # there is no container, or none with a limit
        return free
    # Files that were read count as taken until others need the room.
    return max(0, min(free, allowed - taken + _numbers(_CONTAINER / "memory.stat").get("inactive_file", 0)))


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file of lines "name number ..."; none where there is no such file."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()] if path.is_file() else []
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def reset_peak(device: torch.device) -> None:
    """Count from what is held now; where the system cannot, peaks stay those since the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # Linux: resets the high-water mark of the resident set
    except OSError:
        return


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since reset_peak, or since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        marks = [line.split() for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        if marks:
            return 1024 * int(marks[0][1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
