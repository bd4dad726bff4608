"""Seed prompts (user turns) from ShareGPT, code, a JSON or JSONL file of conversations, or a hub dataset."""

import logging
import random
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from medusa_cli.data.code_seeds import code_seeds, is_code
from medusa_cli.data.conversation import Conversation, id_of, messages_of, unread_keys
from medusa_cli.errors import UserError
from medusa_cli.files import catalogue, fetch, hub
from medusa_cli.files.io import HALF, Malformed, ReadReport, is_whole, read_jsonl, usable
from medusa_cli.files.paths import expanded
from medusa_cli.model.chat_template import Message

HUB = {"ultrachat": "HuggingFaceH4/ultrachat_200k"}
# Long turns from ShareGPT, each as a separate conversation: texts to summarize, translate or
# extract from, and code to change.
LONG = "sharegpt-long"
# Length of such a turn in characters, which are about 400 to 1,500 tokens. Most of its text was
# pasted in.
LONG_TURNS = range(1500, 6001)
# Prompts from the sources of installed packages, and ShareGPT conversations that open with a turn
# about programming.
CODE = "code"
CODE_TURNS = "sharegpt-code"
# Possible keys of the prompt in a record that has a prompt instead of messages.
PROMPTS = ("prompt", "question", "instruction", "text")
NAMED = (catalogue.DEFAULT_SEED, LONG, CODE_TURNS, CODE, *HUB)
log = logging.getLogger(__name__)
# Seeds are sorted by length within windows of this many batches. The conversations in a batch then
# have similar lengths (attention runs over the longest one), while the overall order stays random.
WINDOW = 8


def read_seeds(
    source: str, random_seed: int = 0, limit: int | None = None
) -> tuple[list[Conversation], ReadReport]:
    """Reads the user turns of all usable conversations from a named seed, a .json/.jsonl file or a hub dataset id.

    Truncated and malformed records are counted in the report and skipped. Raises UserError if no record is left.
    random_seed, limit: used only for prompts about code, which are generated instead of read.
    """
    report = ReadReport()
    if source == CODE:
        seeds = code_seeds(random_seed, limit)
        report.read = len(seeds)
        return seeds, report
    seeds = usable(_records(source, report), partial(seed_of, report=report), report)
    if source == LONG:
        seeds = long_turns(seeds)
    elif source == CODE_TURNS:
        seeds = about_code(seeds)
    if not seeds:
        why = f" ({report})" if report.skipped else ""
        raise UserError(
            f"@seed {source!r} holds no usable conversation{why}",
            'each record needs "conversations" (from/value) or "messages" (role/content) with a user turn',
        )
    return seeds, report


def _records(source: str, report: ReadReport) -> Iterator[Any]:
    path = expanded(source)
    if source in (catalogue.DEFAULT_SEED, LONG, CODE_TURNS):
        yield from read_jsonl(fetch.sharegpt_path(), report.skip_line, array=True)
    elif source in HUB:
        yield from hub.hub_rows(HUB[source], "@seed", ("train",))
    elif path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"@seed {source!r} is empty", "give a file with conversations")
        if path.suffix == ".txt":
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            yield from ({"prompt": line} for line in lines if line.strip())
            return
        yield from read_jsonl(path, report.skip_line, array=True)
    elif (
        path.suffix in {".json", ".jsonl", ".txt"}
        or source.startswith((".", "/", "~"))
        or source.count("/") != 1
    ):
        raise UserError(
            f"@seed {source!r} does not exist",
            f"give one of {', '.join(NAMED)}, a .json, .jsonl or .txt file, or a hub dataset OWNER/NAME",
        )
    else:
        yield from hub.hub_rows(source, "@seed", ("train",))


def seed_of(record: Any, report: ReadReport) -> Conversation:
    """Returns the system messages and user turns of a record, in order; blank turns are left out.

    The report counts keys that are not read. Raises Malformed if there is no user turn, or if a
    system message stands between a question and its answer.
    """
    if not isinstance(record, dict):
        raise Malformed("not an object")
    if not any(key in record for key in ("messages", "conversations")):
        prompt = next((record[key] for key in PROMPTS if record.get(key)), None)
        record = {**record, "messages": [{"role": "user", "content": prompt}]} if prompt else record
    messages = messages_of(record)
    roles = "".join(message["role"][0] for message in messages)
    if re.search("us+a", roles):
        raise Malformed("a system message between a question and its answer")
    asked = [
        message
        for message in messages
        if message["role"] == "system" or (message["role"] == "user" and message["content"].strip())
    ]
    seed = Conversation(id_of(record), asked, raw=record.get("raw") is True or None)
    if not seed.turns:
        raise Malformed("no user turn")
    if not is_whole("".join(message["content"] for message in asked)):
        raise Malformed(HALF)
    report.leave_out(unread_keys(record, messages))
    return seed


def long_turns(seeds: Sequence[Conversation]) -> list[Conversation]:
    """Returns one seed per long turn, whose id consists of the conversation's id and the turn's number.

    Each seed keeps the system messages in front of its turn.
    """
    chosen = []
    for seed in seeds:
        opening: list[Message] = []
        for number, question in enumerate(seed.questions):
            opening += question[:-1]
            if len(question[-1]["content"]) in LONG_TURNS:
                chosen.append(Conversation(f"{seed.id}/{number}", [*opening, question[-1]]))
    return chosen


def about_code(seeds: Sequence[Conversation]) -> list[Conversation]:
    """Returns the seeds whose first turn is about programming; logs how many turns are about programming."""
    chosen = [seed for seed in seeds if is_code(seed.turns[0])]
    of_code = sum(is_code(turn) for seed in chosen for turn in seed.turns)
    turns = sum(is_code(turn) for seed in seeds for turn in seed.turns)
    log.info(
        f"{len(chosen):,} of {len(seeds):,} conversations open with a programming turn; they have {of_code:,} of "
        f"{turns:,} such turns"
    )
    return chosen


def in_order(
    seeds: Sequence[Conversation], random_seed: int, batch_size: int, max_samples: int | None = None
) -> list[Conversation]:
    """Shuffles seeds, takes max_samples and sorts them by length within windows; a resumed run gets the same order."""
    mixed = list(seeds)
    random.Random(random_seed).shuffle(mixed)
    mixed = mixed[:max_samples]
    size = WINDOW * batch_size
    windows = [mixed[start : start + size] for start in range(0, len(mixed), size)]
    for window in windows:
        window.sort(key=lambda seed: sum(map(len, seed.turns)))
    return [seed for window in windows for seed in window]


def distinct(seeds: Sequence[Conversation], answered: Collection[str] = ()) -> list[Conversation]:
    """Returns the seeds in order, one per distinct first prompt, and all seeds that are already answered.

    Prompts count as equal if they differ only in case, white space and Unicode form.
    """

    def normalize(text: str) -> str:
        return " ".join(unicodedata.normalize("NFKC", text).casefold().split())

    first: dict[tuple[str, ...], str] = {}
    for seed in sorted(seeds, key=lambda seed: seed.id not in answered):
        asked = [message for question in seed.questions[:1] for message in question]
        prompt = tuple(normalize(message["content"]) for message in asked)
        first.setdefault(prompt, seed.id)
    kept = set(first.values())
    return [seed for seed in seeds if seed.id in kept or seed.id in answered]
