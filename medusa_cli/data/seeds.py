"""Seed prompts from ShareGPT, any JSON or JSONL file of conversations, or a hub dataset: the user's turns."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_cli import assets
from medusa_cli.data.conversation import Conversation, messages_of
from medusa_cli.errors import UserError, first_line
from medusa_cli.model.chat_template import HALF, is_whole
from medusa_cli.runs.io import Malformed, ReadReport, read_jsonl, usable

HUB = {"ultrachat": "HuggingFaceH4/ultrachat_200k"}
NAMED = (assets.DEFAULT_SEED, *HUB)


def read_seeds(source: str) -> tuple[list[Conversation], ReadReport]:
    """Reads the user's side of every usable conversation of a named seed, a .json/.jsonl file or a hub dataset id.

    Truncated and malformed records are counted in the report and skipped. Raises UserError if no record is left.
    """
    report = ReadReport()
    seeds = usable(_records(source, report), seed_of, report)
    if not seeds:
        why = f" ({report})" if report.skipped else ""
        raise UserError(
            f"@seed {source!r} holds no usable conversation{why}",
            'each record needs "conversations" (from/value) or "messages" (role/content) with a user turn',
        )
    return seeds, report


def _records(source: str, report: ReadReport) -> Iterator[Any]:
    path = Path(source).expanduser()
    if source == assets.DEFAULT_SEED:
        yield from read_jsonl(assets.sharegpt_path(), report.skip_line, array=True)
    elif source in HUB:
        yield from _hub_rows(HUB[source])
    elif path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"@seed {source!r} is empty", "give a file with conversations")
        yield from read_jsonl(path, report.skip_line, array=True)
    elif path.suffix in {".json", ".jsonl"} or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UserError(
            f"@seed {source!r} does not exist",
            f"give one of {', '.join(NAMED)}, a .json or .jsonl file, or a hub dataset OWNER/NAME",
        )
    else:
        yield from _hub_rows(source)


def _hub_rows(name: str) -> Iterator[Any]:
    """Yields the rows of a hub dataset's training split, or of its first split where it has none of that name."""
    from datasets import load_dataset

    assets.check_hub(name, kind="dataset", named="@seed")
    try:
        splits = load_dataset(name, trust_remote_code=False)
    except Exception as reason:  # the library raises its own and its HTTP client's many types
        raise UserError(
            f"@seed {name!r} could not be loaded from the hub: {first_line(reason)}",
            f"check the name, or use one of {', '.join(NAMED)} or a file",
        ) from reason
    yield from splits["train" if "train" in splits else next(iter(splits))]


def seed_of(record: Any) -> Conversation:
    """Returns the user's side of a record; raises Malformed where it has none."""
    if not isinstance(record, dict):
        raise Malformed("not an object")
    messages = messages_of(record)
    turns = [message["content"] for message in messages if message["role"] == "user" and message["content"].strip()]
    if not turns:
        raise Malformed("no user turn")
    systems = [message["content"] for message in messages if message["role"] == "system"]
    system = systems[-1] if systems else None
    name = record.get("id") or record.get("prompt_id")
    content = json.dumps([system, turns], ensure_ascii=False)
    if not isinstance(name, str | int) or not name:
        name = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:16]
    if not is_whole(f"{name}{content}"):
        raise Malformed(HALF)
    return Conversation.from_turns(str(name), turns, system)
