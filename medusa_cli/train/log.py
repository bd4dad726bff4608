"""Training events, their log (one JSON object per line) and the training curves."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from pathlib import Path
from typing import Any, cast

from msgspec import convert

from medusa_cli.files.io import Malformed, read_jsonl, replacing, write_atomic

NAME = "train.jsonl"


@dataclass(frozen=True)
class Stepped:
    """Records one optimizer step: the loss in nats (with weighted heads), and each head's own loss and top-1 accuracy.

    A head without a target in the step has no loss and no accuracy.
    """

    step: int
    steps: int
    loss: float
    head_losses: list[float | None]
    accuracies: list[float | None]
    lr: float
    grad_norm: float
    positions: int  # of this step
    total_positions: int  # since the training began
    seconds: float
    parts: dict[str, float]  # stage 2: lambda_0 and the language model's own loss
    memory: int = 0  # peak of the process, in bytes


@dataclass(frozen=True)
class Validated:
    """Records each head's loss and top-1 accuracy on held-out conversations after `step` steps.

    A head without a target in these conversations has no loss and no accuracy.
    """

    step: int
    loss: float
    head_losses: list[float | None]
    accuracies: list[float | None]
    positions: int
    total_positions: int
    parts: dict[str, float]  # stage 2: also how far the model has changed

    @property
    def acceptance(self) -> float:
        """Returns the simulated acceptance length: tokens per step with a chain of each head's top-1 token."""
        return acceptance_of(self.accuracies)


def acceptance_of(accuracies: Sequence[float | None]) -> float:
    """Returns 1 + a_1 + a_1 a_2 + ... for top-1 accuracies a_k, as if the heads' guesses were independent.

    The chain ends at the first head without an accuracy.
    """
    measured = takewhile(lambda accuracy: accuracy is not None, accuracies)
    return 1 + sum(accumulate(cast(Iterable[float], measured), mul))


def best_of(checks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the log line of the validation with the highest simulated acceptance length.

    Of several such validations, the earliest is returned. The validation before the first step does
    not count. Returns None if there is no other validation.
    """
    return max(
        (line for line in checks if line["step"]),
        key=lambda line: acceptance_of(line["accuracies"]),
        default=None,
    )


@dataclass(frozen=True)
class Saved:
    """Records that a checkpoint was written after `step` steps."""

    step: int


Logged = Stepped | Validated | Saved
KINDS = {kind.__name__.lower(): kind for kind in (Stepped, Validated, Saved)}


class TrainLog:
    """Writes events to a JSONL file in place of an earlier log; on resume, keeps its events up to the checkpoint."""

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        self.path = path
        kept = (
            [line for line in read_log(path) if line["step"] <= resumed_at]
            if resumed_at is not None
            else []
        )
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._stream = path.open("a", encoding="utf-8")

    def write(self, event: Logged) -> None:
        line = {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
        if isinstance(event, Validated):
            line["acceptance"] = event.acceptance
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log up to the first invalid one, such as a last line that was cut off."""
    lines: list[dict[str, Any]] = []
    heads = 0
    with suppress(ValueError, TypeError, KeyError):
        for line in read_jsonl(path, on_bad=_stop) if path.is_file() else ():
            event = convert(line, KINDS[line["event"]])
            if isinstance(event, Stepped | Validated):
                heads = heads or len(event.head_losses)
                if not len(event.head_losses) == len(event.accuracies) == heads > 0:
                    break
            lines.append(line)
    return lines


def _stop(number: int, reason: str) -> None:
    raise Malformed(reason)


def shares(values: Sequence[float | None]) -> str:
    """Returns fractions with two decimals each, separated by slashes; a dash stands for None."""
    return "/".join("-" if value is None else f"{value:.2f}".lstrip("0") for value in values)


def draw_curves(log: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draws each head's loss and top-1 accuracy over positions: thin lines for training, markers for held-out data."""
    steps = [line for line in log if line["event"] == "stepped"]
    checks = [line for line in log if line["event"] == "validated"]
    labels = {"head_losses": "loss (nats)", "accuracies": "top-1 accuracy"}
    trained, checked = ([line["total_positions"] for line in lines] for lines in (steps, checks))
    with _figure(path, 2, (11, 4)) as (figure, axes):
        for axis, (key, label) in zip(axes, labels.items(), strict=True):
            for head in range(len((steps or checks)[0]["head_losses"]) if steps or checks else 0):
                style = {"color": f"C{head}", "label": f"head {head + 1}"}
                # The accuracy of single batches is noisy; a moving average shows the trend.
                values = _smooth([line[key][head] for line in steps])
                axis.plot(trained, values, color=style["color"], alpha=0.4, linewidth=1)
                held_out = _smooth([line[key][head] for line in checks], 0)
                axis.plot(checked, held_out, marker="o", markersize=3, **style)
            axis.set(
                xlabel="positions", ylabel=label, title=f"{label}; thin: training, marks: held out"
            )
            axis.grid(alpha=0.3)
        # The legend stands next to the axes, where it hides no curve.
        if axes[0].lines:
            handles, names = axes[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside right upper")
        figure.suptitle(title)


def draw_heat_map(accuracies: Sequence[Sequence[float]], path: Path, title: str) -> None:
    """Draws the accuracy of the i-th guess (column) of each head (row), with the numbers in the cells."""
    heads = len(accuracies)
    top = len(accuracies[0])
    with _figure(path, 1, (1.5 + 0.75 * top, 1.4 + 0.6 * heads)) as (figure, (axis,)):
        image = axis.imshow(accuracies, cmap="viridis", aspect="auto", vmin=0)
        for head, row in enumerate(accuracies):
            for guess, value in enumerate(row):
                color = "black" if value > 0.6 * max(map(max, accuracies)) else "white"
                axis.text(
                    guess, head, f"{value:.3f}", ha="center", va="center", color=color, fontsize=8
                )
        axis.set_xticks(range(top), [str(i + 1) for i in range(top)])
        axis.set_yticks(range(heads), [f"head {k + 1}" for k in range(heads)])
        axis.set(xlabel="guess", title=title)
        figure.colorbar(image, label="accuracy")


def _smooth(values: list[float | None], width: int = 4) -> list[float]:
    """Returns the means over up to `width` neighbors on each side; NaN where no value is known."""
    windows = [values[max(0, i - width) : i + width + 1] for i in range(len(values))]
    known = [[value for value in window if value is not None] for window in windows]
    return [sum(window) / len(window) if window else math.nan for window in known]


@contextmanager
def _figure(path: Path, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its axes, then saves the figure."""
    # A Figure object draws without a display and does not change pyplot's global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure, figure.subplots(1, columns, squeeze=False)[0]
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=110)
