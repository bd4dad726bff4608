"""Seed prompts from ShareGPT, any JSON or JSONL of conversations, or a hub dataset: the human turns."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli import assets
from medusa_cli.backbone.dialogue import HALF, is_whole
from medusa_cli.errors import UserError, first_line
from medusa_cli.runs.reading import parse_json
from medusa_cli.runs.usable import Malformed, ReadReport, usable

SELF = "self"  # the model's own questions: see `own_questions`
HUB = {"ultrachat": "HuggingFaceH4/ultrachat_200k"}
NAMED = (assets.DEFAULT_SEED, SELF, *HUB)
USER_ROLES = frozenset({"human", "user"})
MODEL_ROLES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


@dataclass(frozen=True)
class Seed:
    """The human side of one conversation: an id, the turns in order, and a system prompt or None."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None


def read_seeds(source: str) -> tuple[list[Seed], ReadReport]:
    """Read every usable conversation of a named seed, a .json/.jsonl file or a hub dataset id.

    Truncated and malformed records are counted in the report and skipped; UserError if nothing usable remains.
    """
    report = ReadReport()
    seeds = usable(_records(source, report), _seed, report)
    if not seeds:
        why = f" ({report})" if report.skipped else ""
        raise UserError(
            f"@seed {source!r} holds no usable conversation{why}",
            'each record needs "conversations" (from/value) or "messages" (role/content) with a user turn',
        )
    return seeds, report


def _records(source: str, report: ReadReport) -> Iterator[Any]:
    if source == assets.DEFAULT_SEED:
        yield from _json_array(assets.sharegpt_path(), report)
        return
    if source == SELF:
        raise UserError("@seed self names no file: the model asks itself", "use it with `medusa distill`")
    if source in HUB:
        yield from _hub_rows(HUB[source])
        return
    path = Path(source).expanduser()
    if path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"@seed {source!r} is empty", "give a file with conversations")
        with path.open("rb") as stream:
            head = stream.read(4096).lstrip()
        yield from _json_array(path, report) if head.startswith(b"[") else _json_lines(path, report)
        return
    looks_local = path.suffix in {".json", ".jsonl"} or source.startswith((".", "/", "~")) or source.count("/") != 1
    if looks_local:
        raise UserError(
            f"@seed {source!r} does not exist",
            f"give one of {', '.join(NAMED)}, a .json or .jsonl file, or a hub dataset OWNER/NAME",
        )
    yield from _hub_rows(source)


def _json_array(path: Path, report: ReadReport) -> Iterator[Any]:
    """Stream a JSON array record by record, so that a file cut off mid-record still gives all whole ones."""
    import ijson

    with path.open("rb") as stream:
        try:
            yield from ijson.items(stream, "item")
        except ijson.IncompleteJSONError:
            report.skip("cut off")
        except (ijson.JSONError, ValueError) as reason:  # no JSON or no UTF-8
            raise UserError(f"@seed {str(path)!r} is no JSON: {reason}", "give a JSON array or JSONL") from reason


def _json_lines(path: Path, report: ReadReport) -> Iterator[Any]:
    with path.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if not line.strip():
                continue
            try:
                yield parse_json(line)
            except ValueError:
                report.skip("no JSON")


def _hub_rows(name: str) -> Iterator[Any]:
    """The rows of a hub dataset's training split (its first split where there is none of that name)."""
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


def _seed(record: Any) -> Seed:
    """The human side of a record; Malformed where it has none."""
    if not isinstance(record, dict):
        raise Malformed("not an object")
    messages = record.get("conversations") or record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Malformed("no conversations or messages")
    turns: list[str] = []
    system = None
    for message in messages:
        if not isinstance(message, dict):
            raise Malformed("a message is not an object")
        role = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if not isinstance(role, str):
            raise Malformed("a message without role")
        if role in MODEL_ROLES:
            continue
        if not isinstance(text, str):
            raise Malformed("a message without text")
        if role == "system":
            system = text
        elif role in USER_ROLES:
            if text.strip():
                turns.append(text)
        else:
            raise Malformed(f"unknown role {role!r}")
    if not turns:
        raise Malformed("no user turn")
    name = next((one for key in ("id", "prompt_id") if isinstance(one := record.get(key), str | int) and one), None)
    content = json.dumps([system, turns], ensure_ascii=False)
    if not is_whole(f"{name}{content}"):
        raise Malformed(HALF)
    return Seed(str(name or hashlib.sha256(content.encode()).hexdigest()[:16]), tuple(turns), system)
