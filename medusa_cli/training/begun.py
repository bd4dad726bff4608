"""State rows that a prefill is making: appended as they come, and gone on with where a killed one stopped."""

import fcntl
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import accumulate
from pathlib import Path

from medusa_cli.runs.reading import check_regular
from medusa_cli.states import StateStore


def part_of(path: Path, rank: int = 0, size: int = 1) -> Path:
    """Where one of so many processes writes its part of a file of states, until that is whole."""
    return path.with_name(f"{path.name}.part-{rank}-of-{size}")


def _whole_of(part: Path) -> Path:
    """The file of states that a part becomes one of."""
    return part.with_suffix("")


@contextmanager
def begun(part: Path, width: int, rows: Sequence[int]) -> Iterator[tuple[StateStore | None, int]]:
    """A part to append to, for conversations of so many rows each, and how many of these it holds already.

    What a killed prefill wrote of one more is dropped. Another process that writes the same part is waited for: where
    it has made the whole of it, there is nothing left to append, and no part.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with _locked(part):
        if _whole_of(part).is_file():
            part.unlink()
            yield None, len(rows)
            return
        with closing(StateStore(part, width)) as store:
            ends = [0, *accumulate(rows)]
            there = bisect_right(ends, store.rows) - 1
            store.truncate(ends[there])
            yield store, there
            store.sync()


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Be the only one to hold the part that lies there, made empty where there is none."""
    check_regular(part)
    while True:
        with part.open("ab") as held:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(held, fcntl.LOCK_EX)
            if _lies_at(part, held.fileno()):  # else whoever was waited for has moved or removed it
                yield
                return


def _lies_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one of a name still."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def join(path: Path, size: int) -> None:
    """Make one file of the parts of so many processes, and remove what other numbers of processes left.

    Killed on the way, it leaves a first part that is too long, which `begun` cuts.
    """
    first = part_of(path, 0, size)
    if first.is_file():  # else another process was waited for, which has ended the work
        with first.open("ab") as out:
            for rank in range(1, size):
                with part_of(path, rank, size).open("rb") as part:
                    shutil.copyfileobj(part, out)
            out.flush()
            os.fsync(out.fileno())
        first.replace(path)
    for left in path.parent.glob(f"{path.name}.*"):
        left.unlink()
