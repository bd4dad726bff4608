"""The progress bar of `console.progress`; apart from it, since rich's progress module is slow to import."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from medusa_cli.screen import visible


class _Rate(ProgressColumn):
    """Done of total, and units a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        done = f"{task.completed:,.0f}" + (f"/{task.total:,.0f}" if task.total is not None else "")
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text(f"{done} {self._unit}")
        shown = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        return Text(f"{done} {self._unit}, {shown}/s")


class _Shown(Progress):
    """Bars below a table of one row, once there is one."""

    cells: Mapping[str, str] = MappingProxyType({})

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.cells:
            table = Table(*self.cells, box=None, pad_edge=False, header_style="dim")
            table.add_row(*self.cells.values())
            yield table
        yield from super().get_renderables()


class _Bar:
    def __init__(self, shown: _Shown, task: TaskID) -> None:
        self._shown, self._task = shown, task

    def advance(self, count: float = 1) -> None:
        """Count that many more units as done."""
        self._shown.advance(self._task, count)

    def describe(self, text: str) -> None:
        """Replace the text before the bar."""
        self._shown.update(self._task, description=visible(text))

    def show(self, cells: Mapping[str, str]) -> None:
        """Replace the table above the bar: column names and the cells of its row."""
        self._shown.cells = cells


@contextmanager
def show_bar(console: Console, description: str, total: float | None, unit: str) -> Iterator[_Bar]:
    """A live bar on the console until the block ends."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
    )
    with _Shown(*columns, console=console) as shown:
        yield _Bar(shown, shown.add_task(visible(description), total=total))
