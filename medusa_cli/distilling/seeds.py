"""Seed prompts from ShareGPT, any JSON or JSONL of conversations, or a hub dataset: the human turns."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_cli import assets
from medusa_cli.backbone.dialogue import HALF, is_whole
from medusa_cli.errors import UserError, first_line
from medusa_cli.runs.reading import parse_json

HUB = {"ultrachat": "HuggingFaceH4/ultrachat_200k"}
NAMED = (assets.DEFAULT_SEED, *HUB)
USER_ROLES = frozenset({"human", "user"})
MODEL_ROLES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


@dataclass(frozen=True)
class Seed:
    """The human side of one conversation: an id, the turns in order, and a system prompt or None."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None


@dataclass
class SeedReport:
    """How many conversations were read and skipped, by reason, and whether the file ended mid-record."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    cut_off: bool = False

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def __str__(self) -> str:
        parts = [f"{self.read:,} conversations read"]
        parts += [f"{count:,} skipped ({reason})" for reason, count in sorted(self.skipped.items())]
        return ", ".join(parts + (["the file is cut off after them"] if self.cut_off else []))


def read_seeds(source: str) -> tuple[list[Seed], SeedReport]:
    """Read every usable conversation of a named seed, a .json/.jsonl file or a hub dataset id.

    Truncated and malformed records are counted in the report and skipped; UserError if nothing usable remains.
    """
    report = SeedReport()
    seeds: list[Seed] = []
    seen: set[str] = set()
    for record in _records(source, report):
        seed = _seed(record, report)
        if seed is None:
            continue
        if seed.id in seen:
            report.skip("same id as an earlier one")
            continue
        seen.add(seed.id)
        seeds.append(seed)
        report.read += 1
    if not seeds:
        why = f" ({report})" if report.skipped or report.cut_off else ""
        raise UserError(
            f"@seed {source!r} holds no usable conversation{why}",
            'each record needs "conversations" (from/value) or "messages" (role/content) with a user turn',
        )
    return seeds, report


def _records(source: str, report: SeedReport) -> Iterator[Any]:
    if source == assets.DEFAULT_SEED:
        yield from _json_array(assets.sharegpt_path(), report)
        return
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


def _json_array(path: Path, report: SeedReport) -> Iterator[Any]:
    """Stream a JSON array record by record, so that a file cut off mid-record still gives all whole ones."""
    import ijson

    with path.open("rb") as stream:
        try:
            yield from ijson.items(stream, "item")
        except ijson.IncompleteJSONError:
            report.cut_off = True
        except (ijson.JSONError, ValueError) as reason:  # no JSON or no UTF-8
            raise UserError(f"@seed {str(path)!r} is no JSON: {reason}", "give a JSON array or JSONL") from reason


def _json_lines(path: Path, report: SeedReport) -> Iterator[Any]:
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


def _seed(record: Any, report: SeedReport) -> Seed | None:
    if not isinstance(record, dict):
        report.skip("not an object")
        return None
    messages = record.get("conversations") or record.get("messages")
    if not isinstance(messages, list) or not messages:
        report.skip("no conversations or messages")
        return None
    turns: list[str] = []
    system = None
    for message in messages:
        if not isinstance(message, dict):
            report.skip("a message is not an object")
            return None
        role = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if not isinstance(role, str):
            report.skip("a message without role")
            return None
        if role in MODEL_ROLES:
            continue
        if not isinstance(text, str):
            report.skip("a message without text")
            return None
        if role == "system":
            system = text
        elif role in USER_ROLES:
            if text.strip():
                turns.append(text)
        else:
            report.skip(f"unknown role {role!r}")
            return None
    if not turns:
        report.skip("no user turn")
        return None
    name = next((one for key in ("id", "prompt_id") if isinstance(one := record.get(key), str | int) and one), None)
    content = json.dumps([system, turns], ensure_ascii=False)
    if not is_whole(f"{name}{content}"):
        report.skip(HALF)
        return None
    return Seed(str(name or hashlib.sha256(content.encode()).hexdigest()[:16]), tuple(turns), system)
