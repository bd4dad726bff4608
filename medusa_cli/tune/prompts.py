"""The prompts and conversations that a drafter is tuned on, and the held-out questions that it is measured on."""

import logging
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from medusa_cli.bench.questions import Question
from medusa_cli.data.conversation import Conversation, id_of, tokenized_of
from medusa_cli.data.packing import held_out_ids
from medusa_cli.data.seeds import read_seeds, seed_of
from medusa_cli.errors import UserError
from medusa_cli.files.catalogue import DEFAULT_SEED
from medusa_cli.files.io import Malformed, ReadReport, read_jsonl, usable
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.digest import weights_of
from medusa_cli.runs.resolve import shipped_by_shape

CODE = "code"
# Maximum number of generated prompts about code; reading the sources for more would take longer.
CODE_PROMPTS = 4_000
# The share of the conversations that is held out, and the maximum number of questions from this
# share.
HELD_OUT = 0.05
QUESTIONS = 8
LONGEST_QUESTION = 2_000  # characters
LONGEST_ANSWERED = 4_096  # tokens of a recorded conversation
TWO = "give at least two prompts"
log = logging.getLogger(__name__)


def read_prompts(model: ModelSource, data: Path | None) -> tuple[list[Conversation], str]:
    """Returns seeds and the name of their source; conversations that the model answered keep its answers.

    Without data, the prompts come from chats; for models that write code, half of the prompts are
    about code. Raises UserError for data without a usable prompt.
    """
    if data is None:
        chats, report = read_seeds(DEFAULT_SEED)
        log.info(f"prompts of {DEFAULT_SEED}: {report}")
        if not writes_code(model):
            return chats, DEFAULT_SEED
        code, _ = read_seeds(CODE, limit=CODE_PROMPTS)
        mixed = chain.from_iterable(zip_longest(chats[: len(code)], code))
        return [seed for seed in mixed if seed is not None], f"{DEFAULT_SEED}, {CODE}"
    if not data.is_file():
        raise UserError(f"@data {data} does not exist", "give a file of prompts or conversations")
    if data.suffix == ".txt":
        seeds, report = read_seeds(str(data))
    else:
        report = ReadReport()
        weights = weights_of(model)
        records = read_jsonl(data, report.skip_line, array=True)
        seeds = usable(records, lambda record: _seed(record, weights, report), report)
    log.info(f"{data}: {report}")
    if not seeds:
        raise UserError(f"@data {data} holds no usable prompt ({report})", TWO)
    return seeds, str(data)


def _seed(record: Any, weights: str | None, report: ReadReport) -> Conversation:
    """Returns a record's conversation if the model with these weights answered it, otherwise only its user turns."""
    own = isinstance(record, dict) and record.get("weights") not in (None, "")
    if own and record["weights"] == weights:
        conversation = tokenized_of(
            {
                "id": id_of(record),
                **{key: record.get(key, []) for key in ("messages", "tokens", "spans")},
            }
        )
        if len(conversation.tokens) <= LONGEST_ANSWERED:
            return conversation
        raise Malformed(f"more than {LONGEST_ANSWERED:,} tokens")
    return seed_of(record, report)


def writes_code(model: ModelSource) -> bool:
    """Returns True if the name of a model, or of a related model with an included drafter, says that it writes code."""
    names = [model.name, *(run.name for run in shipped_by_shape(model))]
    return any(CODE in name.lower() for name in names)


def held_out_questions(seeds: Sequence[Conversation]) -> list[Question]:
    """Returns the first turns of conversations that training holds out; raises UserError if there are none."""
    held_out = held_out_ids([seed.id for seed in seeds], HELD_OUT)
    asked = [
        Question(seed.id, "held-out", tuple(seed.turns[:1]), (), seed.system)
        for seed in seeds
        if seed.id in held_out
        and not seed.raw
        and seed.turns
        and len(seed.turns[0]) <= LONGEST_QUESTION
    ]
    if not asked:
        raise UserError("@data holds no prompt that can be held out", TWO)
    return asked[:QUESTIONS]
