"""Distillation by several processes: each writes a part of its own, and the parts become one file."""

import os
import shutil
from pathlib import Path

import torch

from medusa_cli.distilling.distilled import Distilled
from medusa_cli.distilling.records import RecordWriter, whole_lines
from medusa_cli.runs.run import Run
from medusa_cli.states import seal


def part_of(run: Run, rank: int) -> Run:
    """The folder in which one process of several keeps its conversations, laid out as a run."""
    return Run.open(str(_folder(run) / f"{rank:03d}") + os.sep, create=True)


def merge_parts(run: Run, writer: RecordWriter, hidden_size: int) -> int:
    """Move the conversations of all parts into the run's own file; return how many.

    A part goes only when all it holds is on disk, and what is there already is passed over: killed at any moment,
    the next merge ends the work. UserError for parts made from another seed or with other settings.
    """
    moved = 0
    for folder in sorted(_folder(run).glob("*")):
        part = RecordWriter(Run(folder), hidden_size, writer.header, writer.least)
        for record in whole_lines(part.path):
            if record["id"] in writer.done:
                continue
            rows = record.get("state_rows")
            states = part.states.read(*rows) if rows else torch.empty(0, 0)
            spans = [(start, end) for start, end in record["spans"]]
            if rows and record.get("seal") not in (None, seal(record["id"], record["tokens"], spans, states)):
                continue  # rows of something else: the conversation is asked again
            writer.write(Distilled(record["id"], record["messages"], record["tokens"], spans, states))
            moved += 1
        for id, tokens in part.dropped.items():
            if id not in writer.dropped:
                writer.drop(id, tokens)
        part.close()
        writer.sync()
        shutil.rmtree(folder)
    return moved


def _folder(run: Run) -> Path:
    return run.path / "parts"
