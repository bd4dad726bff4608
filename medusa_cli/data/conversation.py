"""The conversation type for seeds, distilled answers and training data, and the reader for conversation files."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from medusa_cli.errors import UserError
from medusa_cli.files.io import HALF, Malformed, ReadReport, is_whole, read_jsonl, usable
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import Message, encode

Count = Annotated[int, Meta(ge=0, lt=2**48)]

# Role names in ShareGPT, in OpenAI's format and in data sets derived from them.
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
# Keys of a record that hold a system prompt, in lower case and without underscores.
SYSTEM = {"system", "systemprompt", "systemmessage", "systeminstruction"}
TWO_SYSTEMS = "two system prompts that differ"
# Keys of a record or message that are read, or whose values only repeat or name values that are
# read.
READ_KEYS = {
    *("id", "prompt_id", "messages", "conversations", "raw", "from", "role", "content", "value"),
    *("tokens", "spans", "state_rows", "states_digest", "input_ids", "loss_mask"),
}
OTHER_DATA = "make it with `medusa distill`, or give other data with @data"


@dataclass(frozen=True)
class Conversation:
    """Holds messages and, once tokenized, the token ids and the spans [start, end) of the answers.

    A seed holds only the system messages and the user turns. state_rows: the first row and the number of rows in a file
    of hidden states, with one row for every position except the last. states_digest: the digest of the tokens and rows.
    raw: True if the only turn is the prompt itself, without a chat template, for example for fill-in-the-middle.
    """

    id: str
    messages: list[Message] = field(default_factory=list)
    tokens: list[Count] = field(default_factory=list)
    spans: list[tuple[Count, Count]] = field(default_factory=list)
    state_rows: tuple[Count, Annotated[int, Meta(ge=1, lt=2**48)]] | None = None
    states_digest: str | None = None
    raw: bool | None = None

    @classmethod
    def from_turns(
        cls, id: str, turns: Sequence[str], system: str | None = None, raw: bool | None = None
    ) -> "Conversation":
        """Returns a seed: the user turns after an optional system prompt."""
        opening = [] if system is None else [{"role": "system", "content": system}]
        return cls(id, [*opening, *({"role": "user", "content": turn} for turn in turns)], raw=raw)

    @property
    def system(self) -> str | None:
        """Returns the system prompt, or None if there is none."""
        return next(
            (message["content"] for message in self.messages[:1] if message["role"] == "system"),
            None,
        )

    @property
    def turns(self) -> list[str]:
        """Returns the texts of the user turns."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def questions(self) -> list[list[Message]]:
        """Returns each user turn with the system messages in front of it."""
        questions: list[list[Message]] = [[]]
        for message in self.messages:
            if message["role"] != "assistant":
                questions[-1].append(message)
            if message["role"] == "user":
                questions.append([])
        return questions[:-1]

    @property
    def positions(self) -> int:
        """Returns the number of answer tokens, which are the positions to train on."""
        return sum(end - start for start, end in self.spans)

    def to_json(self) -> str:
        """Returns the conversation as a line of distill.jsonl."""
        return json.dumps(
            {key: value for key, value in asdict(self).items() if value is not None},
            ensure_ascii=False,
        )


def messages_of(record: dict[str, Any]) -> list[Message]:
    """Returns a record's messages (role, content) from OpenAI's "messages" or ShareGPT's "conversations".

    A system prompt in a separate key becomes the first message. Raises Malformed with the reason if
    the record has another form.
    """
    raw = record.get("messages") or record.get("conversations")
    if not isinstance(raw, list) or not raw:
        raise Malformed("no messages or conversations")
    messages = []
    for message in raw:
        if not isinstance(message, dict):
            raise Malformed("a message is not an object")
        role = message.get("role", message.get("from"))
        text = _text_of(message.get("content", message.get("value")))
        if not isinstance(role, str) or role not in ROLES:
            raise Malformed(f"unknown role {role!r}")
        if not isinstance(text, str):
            raise Malformed("a message without text")
        messages.append({"role": ROLES[role], "content": text})
    return _with_system(record, messages)


def _with_system(record: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Returns the messages, with the system prompt of a separate key (if any) in front of them.

    Raises Malformed if that prompt differs from the system prompt among the messages.
    """
    system = system_of(record)
    if system is None:
        return messages
    opening = messages[0]
    if opening["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if opening["content"].strip() != system.strip():
        raise Malformed(TWO_SYSTEMS)
    return messages


def system_of(record: dict[str, Any]) -> str | None:
    """Returns the system prompt in a separate key of a record, or None.

    Raises Malformed if a system prompt is not text, or if two system prompts differ.
    """
    values = [_text_of(value) for key, value in record.items() if _is_system(key) and value]
    if not all(isinstance(text, str) for text in values):
        raise Malformed("a system prompt that is not text")
    texts = {text.strip(): text for text in values if text.strip()}
    if len(texts) > 1:
        raise Malformed(TWO_SYSTEMS)
    return next(iter(texts.values()), None)


def _is_system(key: str) -> bool:
    return key.lower().replace("_", "") in SYSTEM


def unread_keys(record: dict[str, Any], messages: list[Message]) -> list[str]:
    """Returns the keys of a record, and of its messages, that hold unread text.

    Values that repeat a message are not counted.
    """
    texts = {message["content"] for message in messages}

    def unread(holder: dict[str, Any]) -> list[str]:
        return [
            key
            for key, value in holder.items()
            if key not in READ_KEYS
            and isinstance(value, str | list | dict)
            and value
            and not (isinstance(value, str) and (value in texts or not value.strip()))
        ]

    keys = [key for key in unread(record) if not _is_system(key)]
    inside = [
        key
        for message in (record.get("messages") or record["conversations"])
        for key in unread(message)
    ]
    return [*keys, *dict.fromkeys(f"messages.{key}" for key in inside)]


def _text_of(content: Any) -> Any:
    """Returns the text of a message's content.

    The content may be a list of parts, as in OpenAI's format. Returns None unless all parts are text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or part.get("text") is None:
            return None
        texts.append(part["text"])
    return "".join(text for text in texts if isinstance(text, str))


def specforge_row(conversation: Conversation) -> dict[str, Any]:
    """Returns a conversation as a row in the data format of SpecForge and speculators."""
    return {"id": conversation.id, "conversations": conversation.messages}


def speculators_row(conversation: Conversation) -> dict[str, Any]:
    """Returns a tokenized conversation as a speculators row: token ids, and a mask that is 1 for answer tokens."""
    mask = [0] * len(conversation.tokens)
    for start, end in conversation.spans:
        mask[start:end] = [1] * (end - start)
    return {**specforge_row(conversation), "input_ids": conversation.tokens, "loss_mask": mask}


def _spans_of(mask: Any, length: int) -> list[tuple[int, int]]:
    """Returns the spans [start, end) of a loss mask; raises Malformed unless the mask has a 0 or 1 for every token.

    If a row begins with an answer, no position precedes the answer's first token, so this token is
    left out.
    """
    if (
        not isinstance(mask, list)
        or len(mask) != length
        or not all(value in (0, 1) for value in mask)
    ):
        raise Malformed("a loss_mask that does not fit input_ids")
    learned = [False, *(bool(value) for value in mask[1:]), False]
    edges = [at for at in range(1, len(learned)) if learned[at] != learned[at - 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def id_of(record: dict[str, Any]) -> str:
    """Returns a record's id, or a digest of the record if it has none; raises Malformed for an unusable id."""
    given = (record.get("id"), record.get("prompt_id"))
    name = next((id for id in given if id is not None and id is not False and id != ""), None)
    if not isinstance(name, str | int | None):
        raise Malformed("an id that is not text")
    try:
        if name is None:
            text = json.dumps(record, sort_keys=True, default=str)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
    except RecursionError:
        raise Malformed("nested too deep") from None
    name = str(name)
    if not is_whole(name):
        raise Malformed(HALF)
    return name


def tokenized_of(record: Any) -> Conversation:
    """Returns a conversation with token ids, such as a line of distill.jsonl; raises Malformed for anything else."""
    try:
        conversation = msgspec.convert(record, Conversation)
    except ValueError as reason:
        raise Malformed("a field of another type") from reason
    bounds = [bound for span in conversation.spans for bound in span]
    if not bounds or any(start >= end for start, end in conversation.spans):
        raise Malformed("no answers")
    if bounds != sorted(bounds) or not 1 <= bounds[0] < bounds[-1] <= len(conversation.tokens):
        raise Malformed("assistant spans out of order or range")
    if (
        conversation.state_rows is not None
        and conversation.state_rows[1] != len(conversation.tokens) - 1
    ):
        raise Malformed("state rows that do not match the tokens")
    return conversation


def _content_of(record: Any) -> Conversation | list[Message]:
    """Returns a record's token ids with answer spans, or its messages; raises Malformed if the record is unusable."""
    if not isinstance(record, dict):
        raise Malformed("not an object")
    name = id_of(record)
    if isinstance(record.get("input_ids"), list) and "loss_mask" in record:  # speculators format
        ids = record["input_ids"]
        record = {"tokens": ids, "spans": _spans_of(record["loss_mask"], len(ids))}
    if "tokens" in record:
        return tokenized_of({**record, "id": name})
    messages = messages_of(record)
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise Malformed("no answer to a question")
    return messages


def conversation_of(record: Any, backbone: Backbone, report: ReadReport) -> Conversation:
    """Returns a parsed record as a tokenized conversation, truncated to the model's context.

    The report counts keys that are not read. Raises Malformed if the record is unusable.
    """
    content = _content_of(record)
    limit = backbone.max_positions
    if isinstance(content, Conversation):
        conversation = content
        if any(token >= backbone.vocab_size for token in conversation.tokens):
            raise Malformed("token ids outside the model's vocabulary")
    else:
        conversation = Conversation(id_of(record), content, *encode(backbone, content))
        report.leave_out(unread_keys(record, content))
    if conversation.state_rows is not None or len(conversation.tokens) <= limit:
        return conversation
    spans = [(start, min(end, limit)) for start, end in conversation.spans if start < limit]
    if not spans:  # no states can be computed past the context
        raise Malformed("answers past the model's context")
    return Conversation(
        conversation.id,
        conversation.messages,
        conversation.tokens[:limit],
        spans,
        raw=conversation.raw,
    )


def check_conversations(path: Path) -> None:
    """Raises UserError if a file is missing or empty, or if none of its records is a conversation."""
    if not path.is_file():
        raise UserError(f"{path} does not exist", OTHER_DATA)
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty", OTHER_DATA)
    report = ReadReport()
    for record in read_jsonl(path, report.skip_line, array=True):
        try:
            _content_of(record)
            return
        except Malformed as reason:
            report.skip(str(reason))
    raise UserError(f"{path} holds no usable conversation ({report})", OTHER_DATA)


def read_conversations(path: Path, backbone: Backbone) -> tuple[list[Conversation], ReadReport]:
    """Reads conversations from a JSONL file or a JSON array.

    The chat template tokenizes conversations without token ids. Malformed and truncated records are
    counted and skipped. Raises UserError if the file is missing or empty, or if no record is left.
    """
    check_conversations(path)
    report = ReadReport()
    records = read_jsonl(path, report.skip_line, array=True)
    conversations = usable(
        records, partial(conversation_of, backbone=backbone, report=report), report
    )
    if not conversations:
        raise UserError(f"{path} holds no usable conversation ({report})", OTHER_DATA)
    return conversations, report
