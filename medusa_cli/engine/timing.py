"""The file that keeps the times of decoding steps on this machine."""

import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import transformers
from msgspec import Meta

from medusa_cli import __version__
from medusa_cli.device import processor
from medusa_cli.errors import UserError
from medusa_cli.files.io import read_object, write_json
from medusa_cli.files.paths import home
from medusa_cli.native import cpu_count, instruction_set, is_available
from medusa_cli.native.library import LIBRARY

# Seconds by the amount of work, such as the number of rows, nodes or levels.
Curve = Mapping[Annotated[int, Meta(ge=1, le=1024)], Annotated[float, Meta(gt=0, lt=1e4)]]
T = TypeVar("T")
# The config fields that do not change a step's time. Fields that begin with an underscore do not
# change it, either.
NAMES = ("architectures", "transformers_version")
# A timing thread computes or spins all the time. If it ran for less than this share of the time,
# the machine was busy, and steps are timed again after RETRY_AFTER seconds. They are not timed again
# at every start, because timing takes longest on a busy machine.
UNDISTURBED = 0.8
RETRY_AFTER = 3600
log = logging.getLogger(__name__)


def timings_file() -> Path:
    return home() / "timings.json"


def read_timings(key: str, kind: type[T]) -> T | None:
    """Returns the timings kept under a key; None if there are none or the file is damaged."""
    try:
        kept = _read_file().get(key)
        return None if kept is None else msgspec.convert(kept, kind, str_keys=True)
    except (UserError, ValueError, OverflowError) as reason:
        log.warning(
            "%s cannot be used; timings are measured again (%s)",
            timings_file(),
            str(reason).split(";")[0],
        )
        return None


def keep_timings(key: str, timings: Any) -> None:
    """Keeps timings under a key in the file; if it cannot be written, they are measured again next time."""
    kept: dict[str, Any] = {}
    try:
        with _locked():
            with suppress(UserError):  # a damaged file is replaced
                kept = _read_file()
            write_json(timings_file(), {**kept, key: msgspec.to_builtins(timings, str_keys=True)})
    except OSError as reason:
        log.warning("timings cannot be kept in %s: %s", timings_file(), reason.strerror)


def watched(measure: Callable[[], T]) -> tuple[T, float | None]:
    """Returns a measurement and, if other programs used much of the CPU during it, the current time, else None."""
    wall = time.perf_counter()
    own = time.thread_time()
    measurement = measure()
    busy = time.thread_time() - own < UNDISTURBED * (time.perf_counter() - wall)
    return measurement, time.time() if busy else None


def is_doubtful(busy: float | None) -> bool:
    """Returns True if the machine was busy when it was timed, at least RETRY_AFTER seconds ago."""
    return busy is not None and not 0 <= time.time() - busy < RETRY_AFTER


def _read_file() -> dict[str, Any]:
    return read_object(timings_file(), "the timings") if timings_file().is_file() else {}


@contextmanager
def _locked() -> Iterator[None]:
    """Waits until no other process changes the timings file."""
    path = timings_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as handle:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def machine_key(config: Any) -> str:
    """Returns the key of timings: CPU, threads, the library's build, versions and a digest of the model's config."""
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in NAMES
    }
    text = json.dumps(fields, sort_keys=True, default=str)
    build = torch.backends.cpu.get_cpu_capability()
    if is_available():
        build = f"{instruction_set()} {_digest_of(LIBRARY)}"
    return "|".join(
        (
            processor(),
            build,
            str(cpu_count()),
            torch.__version__,
            transformers.__version__,
            __version__,
            config.model_type,
            hashlib.sha256(text.encode()).hexdigest()[:16],
        )
    )


@cache
def _digest_of(path: Path) -> str:
    """Returns a digest of a file that does not change while this process runs."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def random_tokens(count: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Returns random token ids [count]; in mixtures of experts, passes over equal tokens would read fewer weights."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator)
