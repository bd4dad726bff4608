"""Distillation by several processes: each writes a part of its own, and the parts become one file."""

import os
import shutil
from pathlib import Path

from medusa_cli.distilling.merging import TAKEN, copied
from medusa_cli.distilling.records import RecordWriter
from medusa_cli.runs.run import Run


def part_of(run: Run, rank: int) -> Run:
    """The folder in which one process of several keeps its conversations, laid out as a run."""
    return Run.open(str(_folder(run) / f"{rank:03d}") + os.sep, create=True)


def merge_parts(run: Run, writer: RecordWriter, width: int) -> int:
    """Move the conversations of all parts into the run's own file; return how many.

    A part goes only when all it holds is on disk, and what is there already is passed over: killed at any moment,
    the next merge ends the work. UserError for parts made from another seed or with other settings.
    """
    moved = 0
    for folder in sorted(_folder(run).glob("*")):
        part = RecordWriter(Run(folder), width, writer.header, writer.least)
        moved += sum(became == TAKEN for became in copied(Run(folder), writer, width))
        for id, tokens in part.dropped.items():
            if id not in writer.dropped:
                writer.drop(id, tokens)
        part.close()
        writer.sync()
        shutil.rmtree(folder)
    return moved


def unmerged(run: Run) -> bool:
    """Whether a run has parts of a distillation that has not ended."""
    return any(_folder(run).glob("*/distill.jsonl"))


def _folder(run: Run) -> Path:
    return run.path / "parts"
