"""Times work on this machine, and keeps the times of decoding steps in one file."""

import logging
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta

from medusa_cli.assets import home
from medusa_cli.errors import UserError
from medusa_cli.native import cpu_count, instructions, is_available
from medusa_cli.runs.io import read_object, write_json

# Seconds by size (rows, nodes, levels), by the name of the work.
Curve = Mapping[Annotated[int, Meta(ge=1, le=1024)], Annotated[float, Meta(gt=0, lt=1e4)]]
T = TypeVar("T")
# The fields of a config that a step's time depends on; some families lack some.
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
)
# A timing thread computes or spins all the while. If it ran for a smaller share of the time, the
# machine was busy, and it is timed again after so many seconds: not at each start, which takes
# longest on a busy machine.
UNDISTURBED = 0.8
RETRY_AFTER = 3600
# Bytes copied to measure the memory's bandwidth.
COPIED_BYTES = 256 * 2**20
# Its first line names NVIDIA's driver.
DRIVER = Path("/proc/driver/nvidia/version")
log = logging.getLogger(__name__)


def best_time(device: torch.device, work: Callable[[], object], laps: int = 6) -> float:
    """Returns the seconds of the fastest lap: disturbances of a machine only add, and the first lap warms up."""
    best = float("inf")
    for _ in range(laps):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes a second, read and written, that a plain copy moves."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / best_time(device, lambda: target.copy_(source))


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timings_file() -> Path:
    return home() / "timings.json"


def read_timings(key: str, kind: type[T]) -> T | None:
    """Returns the kept timings of a key; None if there are none, or the file is damaged."""
    try:
        kept = _read_file().get(key)
        return None if kept is None else msgspec.convert(kept, kind, str_keys=True)
    except (UserError, ValueError, OverflowError) as reason:
        log.warning("%s cannot be used; timings are measured again (%s)", timings_file(), str(reason).split(";")[0])
        return None


def keep_timings(key: str, timings: Any) -> None:
    """Keeps the timings of a key in the file; without a writable file they are measured again next time."""
    kept: dict[str, Any] = {}
    with suppress(UserError):  # a damaged file is replaced
        kept = _read_file()
    try:
        write_json(timings_file(), {**kept, key: msgspec.to_builtins(timings, str_keys=True)})
    except OSError as reason:
        log.warning("timings cannot be kept in %s: %s", timings_file(), reason.strerror)


def watched(measure: Callable[[], T]) -> tuple[T, float | None]:
    """Returns a measurement, and the time if other programs took much of the processor meanwhile, else None."""
    wall = time.perf_counter()
    own = time.thread_time()
    measurement = measure()
    busy = time.thread_time() - own < UNDISTURBED * (time.perf_counter() - wall)
    return measurement, time.time() if busy else None


def is_doubtful(busy: float | None) -> bool:
    """Returns True for timings of a machine that was busy at this time, if that is long enough ago to time it again."""
    return busy is not None and not 0 <= time.time() - busy < RETRY_AFTER


def _read_file() -> dict[str, Any]:
    return read_object(timings_file(), "the timings") if timings_file().is_file() else {}


def machine_key(config: Any) -> str:
    """Returns the key of timings: processor, its instructions, threads, version of torch, shape of the model."""
    shape = [config.model_type, *(getattr(config, name, None) for name in SHAPE)]
    can = instructions()[0] if is_available() else torch.backends.cpu.get_cpu_capability()
    return "|".join((processor(), can, str(cpu_count()), torch.__version__, "x".join(map(str, shape))))


def device_name(device: torch.device) -> str:
    """Returns a device's name for keys of timings: of a GPU its kind, its memory and its driver."""
    if device.type != "cuda":
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    driver = ""
    with suppress(OSError):
        driver = DRIVER.read_text().partition("\n")[0]
    return f"{facts.name}, {facts.total_memory >> 20} MiB, {driver}, CUDA {torch.version.cuda}"


def processor() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return next((name for name in names if not name.isdigit()), platform.processor() or platform.machine())
