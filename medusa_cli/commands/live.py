"""A training as it runs: its events logged and shown, its first Ctrl-C a request to stop."""

import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.commands.groups import Where
from medusa_cli.runs.reading import Document
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from types import FrameType

    from medusa_cli.training import Stepped, Trainer, World


def cells(event: "Stepped", left: int, rate: float) -> dict[str, str]:
    """A step as the cells of the table above the bar; `left` positions are to come, at `rate` a second."""
    shown = {
        "step": f"{event.step:,}/{event.steps:,}",
        "loss": f"{event.loss:.3f}",
        "top-1 by head": "/".join(f"{value:.2f}".lstrip("0") for value in event.accuracies),
    }
    if "lambda_0" in event.parts:
        shown["lambda_0"] = f"{event.parts['lambda_0']:.3f}"
    shown["lr"] = f"{event.lr:.1e}"
    shown["tokens/s"] = f"{rate:,.0f}"
    shown["memory"] = f"{event.memory / 1e9:.1f} GB"
    seconds = int(left / rate) if rate > 0 else 0
    shown["time left"] = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return shown


def name_idle(train: TrainRecipe, world: "World") -> None:
    """Say how many processes find no micro-batch in a step, and which settings give them some."""
    idle = world.size - train.accumulation
    if idle > 0 and world.first:
        console.warn(
            f"{idle} of {world.size} processes have nothing to do: a step has train.accumulation={train.accumulation} "
            f"micro-batches; train.accumulation={train.accumulation * world.size} with "
            f"train.batch_tokens={max(2, train.batch_tokens // world.size)} gives all a part of the same steps"
        )


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop between batches; a second one interrupts at once."""
    asked = threading.Event()

    def ask(number: int, frame: "FrameType | None") -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def follow(trainer: "Trainer") -> Document:
    """Run the training as one of several processes that neither write nor speak."""
    for _ in trainer.events():
        pass
    return {}


def run_training(trainer: "Trainer", target: Run) -> Document:
    """Run the training, logging and showing every event; return what the last ones said."""
    from medusa_cli.commands.outcome import cost, shares, validations
    from medusa_cli.training import Saved, Stepped, Stopped, Validated
    from medusa_cli.training.log import NAME, TrainLog, read_log
    from medusa_cli.training.picture import draw_curves
    from medusa_cli.training.tracker import Board

    log = TrainLog(target.path / NAME, resumed_at=trainer.step if trainer.step else None)
    board = Board(target.path / "tensorboard", resumed_at=trainer.step if trainer.step else None)
    summary: Document = {"stopped": False, "positions": 0, "seconds": 0.0, "loss": None}
    start = time.perf_counter()
    try:
        with console.progress("training", total=trainer.positions, unit="tokens") as bar:
            bar.advance(trainer.positions_done)
            for event in trainer.events():
                log.write(event)
                board.write(event)
                if isinstance(event, Stepped):
                    summary["positions"] += event.positions
                    summary["seconds"] += event.seconds
                    summary["loss"] = event.loss
                    bar.advance(event.positions)
                    rate = summary["positions"] / max(summary["seconds"], 1e-9)
                    bar.show(cells(event, trainer.positions - event.total_positions, rate))
                elif isinstance(event, Validated):
                    right, words = shares(event.accuracies), cost(event.parts)
                    console.info(f"step {event.step}: held-out loss {event.loss:.3f}, top-1 by head {right}{words}")
                elif isinstance(event, Saved | Stopped):
                    draw_curves(
                        read_log(log.path),
                        target.path / "train.png",
                        f"{target.name}: stage {trainer.recipe.train.stage}",
                    )
                    summary["stopped"] = isinstance(event, Stopped)
    finally:
        log.close()
        board.close()
    summary["wall_seconds"] = time.perf_counter() - start
    # From the log, because a training resumed at its very end validates no more.
    return summary | validations(read_log(log.path))


def command_on(words: Mapping[str, object], place: Where) -> str:
    """The command that goes on with a training: the words it was given, and where and how its model is loaded."""
    asked = {f"--{name.replace('_', '-')}": one for name, one in vars(place).items() if one != getattr(Where, name)}
    flags = {**words, **asked}
    given = [(flag, one) for flag, some in flags.items() for one in (some if isinstance(some, list) else [some]) if one]
    said = [str(word) for flag, one in given for word in ((flag,) if one is True else (flag, one))]
    return shlex.join(["medusa", "train", "--resume", *said])
