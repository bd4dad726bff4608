"""The report's charts: each takes figures and gives inline SVG, with axes, units and sample sizes on it."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from medusa_cli.benchmarks.ink import HEIGHT, LINE, PAPER, SERIES, SOFT, TEXT, WIDTH, drawing, series
from medusa_cli.tree.draw import places
from medusa_cli.tree.tree import Tree

INCHES_A_BAR = 0.27
LEGEND = 0.17  # inches a row of the legend
TITLE = 54  # characters of a title's line


class Estimate(NamedTuple):
    """A value with the interval it may lie in (None: not known)."""

    value: float
    interval: tuple[float, float] | None = None


class Point(NamedTuple):
    """A place on a line, with the interval its height may lie in (None: not known)."""

    x: float
    y: float
    interval: tuple[float, float] | None = None


def bars(
    groups: Mapping[str, Mapping[str, Estimate]], unit: str, title: str, order: Sequence[str], line: float | None = None
) -> str:
    """Lying bars, group by group, each series in the colour of its place in `order`; `line` is drawn across, where the
    bars are held against it."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    count = sum(len(group) for group in groups.values()) + 0.6 * len(groups)
    height = 0.9 + INCHES_A_BAR * count + LEGEND * _rows(names)
    with drawing(title, WIDTH, height) as drawn:
        axes, place, ticks = drawn.axes, 0.0, []
        for group, found in groups.items():
            first = place
            for name, bar in found.items():
                axes.barh(place, bar.value, 0.8, color=SERIES[order.index(name) % len(SERIES)], label=name)
                if bar.interval is not None:
                    axes.errorbar(
                        bar.value, place, xerr=_whiskers(bar.value, bar.interval), color=TEXT, capsize=2.5, linewidth=1
                    )
                edge = max(bar.value, bar.interval[1] if bar.interval else 0)
                axes.annotate(f"{bar.value:.2f}", (edge, place), (4, 0), textcoords="offset points", va="center")
                place += 1
            ticks.append(((first + place - 1) / 2, group))
            place += 0.6
        if line is not None:
            axes.axvline(line, color=SOFT, linewidth=0.8, linestyle=":")
        axes.set_yticks(*zip(*ticks, strict=True))
        axes.invert_yaxis()
        axes.margins(x=0.14, y=0.5 / count)
        axes.set(xlabel=unit, title=_wrapped(title))
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        if len(names) > 1:
            _legend(axes)
    return drawn.svg


def lines(
    found: Mapping[str, Sequence[Point]],
    across: str,
    up: str,
    title: str,
    *,
    order: Sequence[str] = (),
    ceilings: Mapping[str, Sequence[Point]] | None = None,
    log: bool = False,
    whole: bool = False,
) -> str:
    """Lines with marks, their intervals as bands; `ceilings` are drawn thin, without marks.

    order: the names whose places give the colours. log: the x axis doubles from tick to tick; whole: x has whole
    numbers alone.
    """
    ceilings = ceilings or {}
    order = order or list(found)
    with drawing(title, WIDTH, HEIGHT + LEGEND * _rows([*found, *ceilings])) as drawn:
        axes = drawn.axes
        for name, points in found.items():
            look = series(order.index(name))
            axes.plot([one.x for one in points], [one.y for one in points], label=name, **look)
            banded = [(one.x, *one.interval) for one in points if one.interval is not None]
            if len(banded) > 1:
                axes.fill_between(*zip(*banded, strict=True), color=look["color"], alpha=0.16, linewidth=0)
        for number, (name, points) in enumerate(ceilings.items()):
            dash = (":", "--")[number % 2]
            axes.plot([p.x for p in points], [p.y for p in points], color=SOFT, linestyle=dash, linewidth=1, label=name)
        places_x = sorted({one.x for points in found.values() for one in points})
        if log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")  # its own writes powers in mathtext, which `ink` switches off
            axes.minorticks_off()
        if (log or whole) and len(places_x) <= 10:
            axes.set_xticks(places_x, [f"{x:g}" for x in places_x])
        axes.set_ylim(bottom=0)
        axes.set(xlabel=across, ylabel=up, title=_wrapped(title))
        _legend(axes)
    return drawn.svg


def decomposed(found: Mapping[str, tuple[float, float]], base: str, title: str, order: Sequence[str]) -> str:
    """Each method as (overhead, acceptance rate): what is gained over plain decoding rises towards the upper left."""
    with drawing(title, WIDTH, HEIGHT + LEGEND * _rows(found)) as drawn:
        axes = drawn.axes
        right = 1.15 * max([1.0, *(overhead for overhead, _ in found.values())])
        top = 1.15 * max([1.0, *(acceptance for _, acceptance in found.values())])
        for gain in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
            end = min(right, top / gain)
            axes.plot([0, end], [0, gain * end], color=LINE, linewidth=1.6 if gain == 1 else 0.9)
            place: Any = {"textcoords": "offset points", "ha": "right", "va": "top"}
            axes.annotate(f"{gain:g}x", (end, gain * end), (-4, -1), color=SOFT, **place)
        for name, (overhead, acceptance) in found.items():
            look = {**series(order.index(name)), "linestyle": "none"}
            axes.plot(overhead, acceptance, markersize=8, label=name, **look)
        axes.set(xlim=(0, right), ylim=(0, top), title=_wrapped(title))
        axes.set(xlabel=f"overhead: a step over a plain step of {base}", ylabel="acceptance: tokens a step")
        _legend(axes)
    return drawn.svg


def scatter(
    found: Mapping[str, Sequence[Point]],
    across: str,
    up: str,
    title: str,
    order: Sequence[str],
    line: float | None = None,
) -> str:
    """Points, one mark and colour a series, with whiskers where their heights lie in an interval.

    line: the height that points are held against, drawn across; the axis then shows what is near it, and not zero.
    """
    with drawing(title, WIDTH, HEIGHT + LEGEND * _rows(found)) as drawn:
        axes = drawn.axes
        for name, points in found.items():
            look = {**series(order.index(name)), "linestyle": "none"}
            axes.plot([one.x for one in points], [one.y for one in points], label=name, alpha=0.85, **look)
            for x, y, interval in points:
                if interval is not None:
                    axes.errorbar(x, y, yerr=_whiskers(y, interval), color=look["color"], capsize=2.5, linewidth=1)
        axes.set(xlabel=across, ylabel=up, title=_wrapped(title))
        axes.margins(0.06)
        if line is None:
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        else:
            axes.axhline(line, color=SOFT, linewidth=0.8, linestyle=":")
        _legend(axes)
    return drawn.svg


def tree_hits(tree: Tree, hits: Sequence[int], title: str) -> str:
    """The tree with every node filled, and marked, by the share of steps that accepted it; branches as wide."""
    steps, x = max(hits[0], 1), places(tree)
    width = max(WIDTH, 0.3 * len(tree.leaves) + 1.2)
    with drawing(title, width, 0.9 + 0.85 * tree.max_depth) as drawn:
        axes = drawn.axes
        for node in range(1, tree.size):
            parent, share = tree.parents[node], hits[node] / steps
            ends = [x[parent], x[node]], [-tree.depths[parent], -tree.depths[node]]
            axes.plot(*ends, color=LINE, linewidth=0.8, zorder=1)
            if share:
                axes.plot(*ends, color=SERIES[0], linewidth=0.5 + 6 * share, alpha=0.55, zorder=1)
        for node in range(tree.size):
            share = hits[node] / steps if node else 1.0
            place: Any = ([x[node]], [-tree.depths[node]])
            axes.scatter(*place, s=120, color=PAPER, zorder=2)
            axes.scatter(*place, s=120, color=SERIES[0], alpha=min(1.0, share), zorder=3, linewidths=0)
            axes.scatter(*place, s=120, facecolors="none", edgecolors=SOFT, linewidths=0.7, zorder=3)
            name = _percent(share) if node else "root"
            axes.annotate(
                name, (x[node], -tree.depths[node]), (0, -13), textcoords="offset points", ha="center", size=7
            )
            if node:
                rank = str(tree.ranks[node] + 1)
                axes.annotate(rank, (x[node], -tree.depths[node]), ha="center", va="center", size=6.5, zorder=4)
        axes.set_yticks([-depth for depth in range(tree.max_depth + 1)])
        axes.set_yticklabels(["root", *(f"head {depth}" for depth in range(1, tree.max_depth + 1))])
        axes.set_xticks([])
        axes.grid(False)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.03, y=0.16)
        axes.set_title(_wrapped(title, width / WIDTH))
    return drawn.svg


def _whiskers(value: float, interval: tuple[float, float]) -> list[list[float]]:
    """How far an interval reaches below and above a value."""
    low, high = interval
    return [[max(value - low, 0)], [max(high - value, 0)]]


def _percent(share: float) -> str:
    """A share in two figures at most."""
    return "0" if not share else f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def _wrapped(title: str, times: float = 1.0) -> str:
    """A title in lines that fit above a chart so many times as wide as usual."""
    return textwrap.fill(title, int(TITLE * times))


def _rows(names: Collection[str]) -> int:
    """Rows of a legend of these names."""
    return (len(names) + 2) // 3 if len(names) > 1 else 0


def _legend(axes: Any) -> None:
    """Each series once, in rows below the chart, where there is more than one."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if len(handles) > 1:
        place: Any = {"loc": "outside lower center", "ncols": min(3, len(handles))}
        axes.figure.legend(handles.values(), handles.keys(), **place)
