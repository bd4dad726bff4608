"""Pictures of a training and of a calibration, as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cli.runs.files import replacing


def draw_curves(log: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Loss and top-1 accuracy per head over positions: training thin, held-out with marks."""
    figure, (left, right) = _figure(1, 2, (11, 4))
    steps = [line for line in log if line["event"] == "stepped"]
    checks = [line for line in log if line["event"] == "validated"]
    heads = len((steps or checks)[0]["head_losses"]) if steps or checks else 0
    for head in range(heads):
        color = f"C{head}"
        for axis, key in ((left, "head_losses"), (right, "accuracies")):
            # A single batch's accuracy jumps about; the mean of its neighbours shows the trend.
            values = _smooth([line[key][head] for line in steps])
            axis.plot([line["total_positions"] for line in steps], values, color=color, alpha=0.4, linewidth=1)
            axis.plot(
                [line["total_positions"] for line in checks],
                [line[key][head] for line in checks],
                color=color,
                marker="o",
                markersize=3,
                label=f"head {head + 1}",
            )
    left.set(xlabel="positions", ylabel="loss (nats)", title="loss (thin: training, marks: held out)")
    right.set(xlabel="positions", ylabel="top-1 accuracy", title="top-1 accuracy")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if heads:
            axis.legend()
    figure.suptitle(title)
    _save(figure, path)


def draw_heat_map(accuracies: Sequence[Sequence[float]], path: Path, title: str) -> None:
    """Accuracy of the i-th guess (column) of each head (row), with the numbers in the cells."""
    heads, top = len(accuracies), len(accuracies[0])
    figure, ((axis,),) = _figure(1, 1, (1.5 + 0.75 * top, 1.4 + 0.6 * heads))
    image = axis.imshow(accuracies, cmap="viridis", aspect="auto", vmin=0)
    for head, row in enumerate(accuracies):
        for guess, value in enumerate(row):
            bright = value > 0.6 * max(max(one) for one in accuracies)
            axis.text(
                guess,
                head,
                f"{value:.3f}",
                ha="center",
                va="center",
                color="black" if bright else "white",
                fontsize=8,
            )
    axis.set_xticks(range(top), [str(i + 1) for i in range(top)])
    axis.set_yticks(range(heads), [f"head {k + 1}" for k in range(heads)])
    axis.set(xlabel="guess", title=title)
    figure.colorbar(image, label="accuracy")
    _save(figure, path)


def _smooth(values: list[float], width: int = 9) -> list[float]:
    windows = [values[max(0, i - width // 2) : i + width // 2 + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    # The object interface draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, (axes[0] if columns > 1 else axes)


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=110)
