"""Commands forked from a process that has imported everything: started in milliseconds, killed at will."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, CompletedProcess, Popen
from typing import Any

from medusa_cli import cli

RUN = Path("runs/r")  # in the folder that a command is started in
PATIENCE = 600.0
# How a user starts two processes.
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
FILE_EVENTS = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.listdir",
}
FILE_METHODS = {"write", "flush", "truncate"}


# Words of `medusa`, or a function that is called instead.
Command = Sequence[str] | Callable[[], None]


@dataclass
class Child:
    """A forked command: the file of its output, and its exit code once it ended (negative: the signal)."""

    pid: int
    output: Path
    code: int | None = None
    seconds: float = 0.0  # of processor time: unlike the clock's, other work does not stretch them


def run(words: Command, place: Path, size: int = 1) -> CompletedProcess[str]:
    """Runs `medusa WORDS` in a folder to the end, by so many processes as torchrun would start them."""
    place.mkdir(parents=True, exist_ok=True)
    port = free_port()
    children = [
        start(
            words,
            place,
            die_at=None,
            rank=rank,
            size=size,
            port=port,
            results=place / f"results-{rank}.txt",
        )
        for rank in range(size)
    ]
    end(children)
    output = "".join(child.output.read_text() for child in children)
    results = "".join((place / f"results-{rank}.txt").read_text() for rank in range(size))
    codes = [child.code for child in children if child.code]
    return CompletedProcess([], codes[0] if codes else 0, results, output)


def start(
    words: Command,
    place: Path,
    *,
    die_at: int | None = 0,
    rank: int = 0,
    size: int = 1,
    port: int = 0,
    results: Path | None = None,
    **environment: str,
) -> Child:
    """Forks `medusa WORDS` in a folder.

    die_at: the file operation in the run before which it is killed (0: never, None: none is counted). results: where
    standard output goes, if not in the file of the output.
    """
    output = place / f"output-{rank}.txt"
    pid = os.fork()
    if pid:
        return Child(pid, output)
    code = 70
    try:
        os.chdir(place)
        os.environ.update(environment)
        with output.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        if results is not None:
            with results.open("w") as out:
                os.dup2(out.fileno(), 1)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if size > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ.update(
                {key: str(value) for key, value in variables.items()}, MASTER_ADDR="127.0.0.1"
            )
        operations = [0] if die_at is None else count_operations(die_at)
        try:
            words() if callable(words) else cli.app(list(words))
            code = 0
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else 0
        except Exception:
            traceback.print_exc()
        (place / f"operations-{rank}").write_text(str(operations[0]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def count_operations(die_at: int) -> list[int]:
    """Counts this process's file operations inside the run from now on, and dies before one of them."""
    count = [0]
    inside = (str(RUN), str(RUN.resolve()))

    def operation(path: Any) -> None:
        if str(path).startswith(inside):
            count[0] += 1
            if count[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def opened(event: str, words: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS:
            operation(words[0])

    def called(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in FILE_METHODS:
            operation(getattr(function.__self__, "name", ""))

    sys.addaudithook(opened)
    sys.setprofile(called)
    return count


def end(children: Sequence[Child], until: float | None = None) -> bool:
    """Waits for forked commands; returns True if one was killed, which takes all with it, as does the time `until`."""
    late = time.monotonic() + PATIENCE
    killed = False
    while any(child.code is None for child in children):
        for child in children:
            if child.code is None:
                pid, status, used = os.wait4(child.pid, os.WNOHANG)
                child.code = os.waitstatus_to_exitcode(status) if pid else None
                child.seconds = used.ru_utime + used.ru_stime
        dead = any(child.code == -signal.SIGKILL for child in children)
        if dead or (until is not None and time.monotonic() > until):
            for child in children:
                if child.code is None:
                    os.kill(child.pid, signal.SIGKILL)
            killed = True
        assert time.monotonic() < late, f"a command hangs: {children[0].output.read_text()}"
        time.sleep(0.002)
    return killed and any(child.code == -signal.SIGKILL for child in children)


def wait_until(ready: Callable[[], bool], children: Sequence[Child]) -> None:
    """Waits until forked commands have done something; fails with their output if they do not."""
    late = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < late, [child.output.read_text() for child in children]
        time.sleep(0.01)


def run_and_kill(words: Sequence[str], ready: Callable[[], bool], ranks: str = "01") -> None:
    """Runs `medusa WORDS` by two processes, as a user starts them, and kills those of some ranks once it is ready."""
    child = Popen([*TWO, "-m", "medusa_cli", *words], stdout=DEVNULL, stderr=DEVNULL)
    late = time.monotonic() + 120
    while time.monotonic() < late and child.poll() is None and not ready():
        time.sleep(0.01)
    for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
        settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(f"RANK={rank}".encode() in settings for rank in ranks):
            os.kill(int(pid), signal.SIGKILL)
    assert child.wait(timeout=60) != 0  # torchrun ends the others


def free_port() -> int:
    with socket.socket() as socket_:
        socket_.bind(("127.0.0.1", 0))
        return int(socket_.getsockname()[1])
