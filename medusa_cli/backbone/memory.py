"""The most memory held at once: of the device under CUDA, elsewhere of the process itself."""

import resource
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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
