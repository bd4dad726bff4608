"""The table above a training's bar: how the last step went and how long the rest will take."""

from typing import Any


def cells(event: Any, left: int, rate: float) -> dict[str, str]:
    """A step as the table's cells; `left` positions are to come, at `rate` a second."""
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
