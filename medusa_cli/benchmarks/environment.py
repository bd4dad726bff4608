"""The machine and the versions that a measurement was taken with."""

import importlib.metadata
import os
import platform

import torch

from medusa_cli.engines.machine import processor

PACKAGES = ("torch", "transformers", "numpy", "peft", "bitsandbytes", "llama-cpp-python")


def environment(device: torch.device) -> dict[str, str | int]:
    """Operating system, processor, cores, threads, memory, accelerator, and versions of what computes."""
    found: dict[str, str | int] = {
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if (memory := _memory()) is not None:
        found["memory_gb"] = memory
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _memory() -> int | None:
    """Gigabytes of main memory, None where the system does not say."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    except (ValueError, OSError, AttributeError):
        return None
