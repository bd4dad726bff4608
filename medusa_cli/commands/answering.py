"""How `medusa distill` has its seeds answered: by the model here or by servers, filed, counted and shown."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.assets import MODELS, model_dir
from medusa_cli.runs.reading import Document
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.distilling import RecordWriter
    from medusa_cli.distilling.distilled import Settings
    from medusa_cli.distilling.endpoint import Endpoint
    from medusa_cli.distilling.failures import Failures
    from medusa_cli.distilling.seeds import Seed
    from medusa_cli.distilling.tokenizer import Tokenizer
    from medusa_cli.training import World


def connect(addresses: str, endpoint_model: str | None, name: str, tokenizer: "Tokenizer") -> "Endpoint":
    """The servers at comma-separated addresses, found to answer for the model; UserError where none does."""
    from medusa_cli.backbone.dialogue import render
    from medusa_cli.distilling.endpoint import Endpoint

    render(tokenizer, [{"role": "user", "content": "Hello"}], prompt=True)  # said at once where there is no template
    server = Endpoint([url.strip() for url in addresses.split(",")], endpoint_model or name, tokenizer)
    for why in server.check():
        console.warn(f"--endpoint {why}; the others take its work until it answers")
    # A named model is a folder to whoever starts a server with it. The folder first: one that loads what it is asked
    # for would look for the name on the hub, for minutes.
    local = [model_dir(name)] if name in MODELS else [str(Path(name).resolve())] if Path(name).is_dir() else []
    server.find([endpoint_model] if endpoint_model else [*local, name, *server.listed()])
    return server


def own_questions(backbone: "Backbone", world: "World", target: Run, settings: "Settings", count: int) -> "list[Seed]":
    """The model's own questions, asked by the first process for all and kept in the run."""
    from medusa_cli.distilling.own_questions import questions

    found: list[Seed] = []
    if world.first:
        with console.progress("asking", total=count, unit="questions") as bar:
            words = {"slots": settings.batch_size, "random_seed": settings.random_seed}
            found = questions(backbone, target, count, **words, on_question=bar.advance)
    found = world.gather(found)[0]
    if len(found) < count:
        console.warn(f"--seed self: the model ended {len(found):,} questions, {count:,} were asked for")
    return found


def from_here(
    backbone: "Backbone",
    todo: "Sequence[Seed]",
    settings: "Settings",
    writer: "RecordWriter",
    failures: "Failures",
    meter: "Meter",
) -> "list[Seed]":
    """Write the model's answers as they come; the seeds that were too long."""
    from medusa_cli.distilling import distill

    def refused(seed: "Seed", reason: str) -> None:
        failures.add(seed.id, reason)
        meter.bar.advance(1)

    answers = distill(backbone, list(todo), settings, on_tokens=meter.tokens, on_skip=meter.skip, on_refusal=refused)
    for sample in answers:
        writer.write(sample)
        meter.bar.advance(1)
    return meter.skipped


def from_server(
    server: "Endpoint",
    todo: "Sequence[Seed]",
    settings: "Settings",
    concurrency: int,
    writer: "RecordWriter",
    failures: "Failures",
    meter: "Meter",
) -> "list[Seed]":
    """Write what the servers answer as it comes; the seeds that were too long."""
    from medusa_cli.distilling.endpoint import Failed, distill_endpoint

    answers = distill_endpoint(
        server, todo, settings, concurrency=concurrency, on_tokens=meter.tokens, on_skip=meter.skip
    )
    for sample in answers:
        meter.bar.advance(1)
        if isinstance(sample, Failed):
            failures.add(sample.id, sample.reason)
        else:
            writer.write(sample)
    return meter.skipped


class Files:
    """Where answers go: the run's file, or under several processes this one's part of it, merged at the end.

    `answered` need not be asked again; `whole`, the run's file, is the first process's alone.
    """

    def __init__(self, world: "World", target: Run, width: int, header: Document, least: int) -> None:
        from medusa_cli.distilling import RecordWriter
        from medusa_cli.distilling.parts import merge_parts, part_of

        self._world, self._target, self._width = world, target, width
        self.whole = RecordWriter(target, width, header, least) if world.first else None
        if self.whole is not None:
            merge_parts(target, self.whole, width)  # what processes that were interrupted had already
            world.wait()  # for the others, who began to wait before they loaded anything
        self.answered = set(world.gather(sorted(self.whole.answered) if self.whole is not None else [])[0])
        self.writer = (
            self.whole
            if self.whole is not None and world.size == 1
            else RecordWriter(part_of(target, world.rank), width, header, least)
        )

    def end(self, counts: tuple[float, ...]) -> list[tuple[float, ...]]:
        """Wait for all processes and merge their parts; what each of them counted."""
        from medusa_cli.distilling.parts import merge_parts

        found: list[tuple[float, ...]] = self._world.gather(counts)
        if self._world.size > 1:
            if self.whole is not None:
                merge_parts(self._target, self.whole, self._width)
                self.whole.close()
            self._world.wait()
            self._world.leave()
        return found


class Meter:
    """Counts answer tokens, shows their rate in the bar's text, and keeps the seeds that were too long."""

    def __init__(self, bar: console.Bar) -> None:
        self._start, self.bar, self.count = time.perf_counter(), bar, 0
        self.skipped: list[Seed] = []

    @property
    def rate(self) -> float:
        """Answer tokens a second so far."""
        return self.count / max(time.perf_counter() - self._start, 1e-9)

    def skip(self, seed: "Seed") -> None:
        self.skipped.append(seed)
        self.bar.advance(1)

    def tokens(self, count: int) -> None:
        self.count += count
        if self.count % 512 < count:
            self.bar.describe(f"distilling ({self.rate:,.0f} tokens/s)")
