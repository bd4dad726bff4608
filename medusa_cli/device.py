"""Information about the processor and memory, timing of work, and copies to a device."""

import ctypes
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.errors import first_line
from medusa_cli.files.cpus import control_groups, sysctl

# Bytes copied to measure the memory bandwidth of a CPU.
COPIED_BYTES = 256 * 2**20
# Bytes copied to measure a GPU's memory bandwidth. A copy of fewer bytes would take hardly longer
# than its launch.
GPU_COPIED_BYTES = 2 * 2**30
# Each device keeps a tensor of the numbers below this limit. The passes of CUDA graphs have fewer
# rows than this.
NUMBERS = 1024
# These numbers are from glibc's malloc.h. glibc limits the mmap threshold to 32 MB and the trim
# threshold to an int.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# The first line of this file states the version of NVIDIA's driver.
DRIVER = Path("/proc/driver/nvidia/version")
log = logging.getLogger(__name__)
_STATUS = Path("/proc/self/status")
_SYSTEM = Path("/proc/meminfo")
_CPUS = Path("/proc/cpuinfo")
# The files of a control group (versions 2 and 1): the limit, the memory in use, and a name in
# memory.stat. That name stands for the part of the page cache that counts as used, but is released
# when needed.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def upload(
    values: Sequence[object] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns host values as a tensor on a device.

    A copy from pageable memory waits for all earlier GPU work; a copy from pinned memory does not.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numbered(count: int, device: torch.device) -> Tensor:
    """Returns 0 .. count - 1 on a device, if possible as a view of numbers that the device keeps.

    On a GPU, making a tensor launches a kernel. The first call must not be made during the capture of a CUDA graph.
    """
    return (
        _first_numbers(device)[:count] if count <= NUMBERS else torch.arange(count, device=device)
    )


@cache
@torch.inference_mode(False)
def _first_numbers(device: torch.device) -> Tensor:
    return torch.arange(NUMBERS, device=device)


def best_time(device: torch.device, work: Callable[[], object], laps: int = 6) -> float:
    """Returns the duration of the fastest lap in seconds.

    Disturbances on the machine only add time, and the first lap serves as a warm-up.
    """
    best = float("inf")
    for _ in range(laps):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bandwidth of a plain copy in bytes per second, counting both reads and writes."""
    size = COPIED_BYTES
    if device.type == "cuda":
        size = min(GPU_COPIED_BYTES, free_memory(device) // 4)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    timed = event_time if device.type == "cuda" else best_time
    return 2 * source.nbytes / timed(device, lambda: target.copy_(source))


def event_time(device: torch.device, work: Callable[[], object], laps: int = 6) -> float:
    """Returns the duration of the fastest lap on a CUDA device in seconds, without the host's launch and wait."""
    best = float("inf")
    for _ in range(laps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            start.record()
            work()
            end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def has_cuda() -> bool:
    """Returns True if there is a CUDA device that runs this torch's kernels; warns if the device is too old."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.ones(1, device="cuda").sum().item()
    # Another program uses the GPU's memory; loading the model reports this.
    except torch.OutOfMemoryError:
        return True
    except (RuntimeError, AssertionError) as reason:  # such as "no kernel image is available"
        log.warning("the GPU cannot run this torch's kernels (%s)", first_line(reason))
        return False
    return True


def has_bf16() -> bool:
    """Returns True if the CPU has bf16 instructions, without which bf16 is many times slower than fp32.

    With MEDUSA_CPU=avx2 in the environment, these instructions are not used, and the result is
    False.
    """
    allowed = os.environ.get("MEDUSA_CPU", "").lower() != "avx2"
    # Builds of torch without oneDNN, such as those for macOS, lack this operation.
    has_onednn = torch.backends.mkldnn.is_available()
    return allowed and has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def free_memory(device: torch.device) -> int:
    """Returns the free memory in bytes of a CUDA device, or else of this machine or its container."""
    if device.type == "cuda":
        # Memory that torch caches for later use is free, too.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = _numbers(_SYSTEM)
    free = 1024 * system["MemAvailable"] if "MemAvailable" in system else whole // 2
    for folder in control_groups("memory"):
        left = _left(folder)
        free = free if left is None else min(free, left)
    return max(0, free)


def _left(folder: Path) -> int | None:
    """Returns how many bytes a control group may still use; None if it has no limit."""
    for limit, usage, released in _LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max", which means no limit
            allowed = int((folder / limit).read_text())
            taken = int((folder / usage).read_text())
            return allowed - taken + _numbers(folder / "memory.stat").get(released, 0)
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers by name from a file with lines "name number ..."; an empty dict if there is no file."""
    text = path.read_text().replace(":", " ") if path.is_file() else ""
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory use in bytes since the process started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    marks = _numbers(_STATUS)
    if "VmHWM" in marks:
        return 1024 * marks["VmHWM"]
    import resource  # does not exist on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def device_name(device: torch.device) -> str:
    """Returns a device's name as a key for timings; for a GPU, with its model, memory, driver and CUDA version."""
    if device.type != "cuda":
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    driver = ""
    with suppress(OSError):
        driver = DRIVER.read_text().partition("\n")[0]
    return f"{facts.name}, {facts.total_memory >> 20} MiB, {driver}, CUDA {torch.version.cuda}"


def processor() -> str:
    """Returns the processor's name as the system reports it; timings are stored under this name."""
    try:
        lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    for key in ("model name", "Model"):
        if (name := facts.get(key, "")) and not name.isdigit():
            return name
    # Linux on ARM states the numbers of the maker and of the core.
    if part := facts.get("CPU part"):
        return f"ARM {facts.get('CPU implementer', '')} {part}"
    brand = sysctl("machdep.cpu.brand_string")
    if brand is not None:
        return brand.rstrip(b"\0").decode(errors="replace")
    return platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, because the system zeroes returned pages before their next use.

    This makes training on two cores 18 % faster.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no mallopt
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 1 << 25)
            mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Returns freed memory to the system.

    Batches differ in size, so holes between the blocks in use add up to several gigabytes over time.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
