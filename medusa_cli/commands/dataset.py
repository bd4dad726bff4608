"""What `train` and `calibrate` share: the run's data set, with a bar while hidden states are computed."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from medusa_cli import console


def open_dataset(run: Any, backbone: Any, *, data: Path | None, fraction: float, taps: tuple[int, ...]) -> Any:
    """The data set of a run (or of the file `data`); a prefill, where one is needed, shows its progress."""
    from medusa_cli.training import load_dataset

    bars: list[console.Bar] = []
    with ExitStack() as stack:

        def begin(total: int) -> None:
            console.info(f"computing the hidden states of {total:,} tokens, once")
            bars.append(stack.enter_context(console.progress("hidden states", total=total, unit="tokens")))

        return load_dataset(
            run,
            backbone,
            data=data,
            fraction=fraction,
            taps=taps,
            on_total=begin,
            on_progress=lambda count: bars[0].advance(count),
        )
