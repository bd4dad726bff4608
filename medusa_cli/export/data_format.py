"""Export of a run's conversations as training rows for SpecForge and speculators."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from medusa_cli.data.conversation import specforge_row, speculators_row
from medusa_cli.distill.distillation import read_distilled
from medusa_cli.errors import UserError
from medusa_cli.export.folder import exporting
from medusa_cli.runs.run import Run

ROWS = "conversations.jsonl"
TOKENS = "tokens.jsonl"


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows as lines of JSON."""
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def export_data(run: Run, output: Path, *, overwrite: bool = False) -> tuple[list[str], list[str]]:
    """Writes a run's conversations twice: as messages, and with token ids and loss masks.

    Prompts without a chat template are only in the second file. Raises UserError if the run has no conversations.
    """
    owner = Run(run.data_path.parent)
    conversations = list(read_distilled(owner))
    if not conversations:
        fault = f"{run.path} holds no conversations"
        raise UserError(fault, f"run `medusa distill --run {run.argument}` first")
    raw = sum(bool(conversation.raw) for conversation in conversations)
    with exporting(output, overwrite) as part:
        write_rows(part / TOKENS, map(speculators_row, conversations))
        write_rows(part / ROWS, (specforge_row(talk) for talk in conversations if not talk.raw))
    notes = [f"{raw:,} prompts without a chat template are only in {TOKENS}"] if raw else []
    return [
        f"SpecForge: --train-data-path {output / ROWS}",
        f"speculators: prepare_data.py --data {output / TOKENS}",
    ], notes
