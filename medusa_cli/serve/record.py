"""Records answers as conversations in a file, if the server's owner asks for it; `medusa tune` reads the file."""

import fcntl
import json
import logging
import os
import stat
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from medusa_cli.decode import Answer
from medusa_cli.decode.grammar import Grammar
from medusa_cli.decode.lazy_grammar import LazyGrammar
from medusa_cli.errors import UserError
from medusa_cli.serve.chats import ChatRequest
from medusa_cli.serve.completions import CompletionRequest

# A request that has this header with one of these values is not recorded.
HEADER = "x-medusa-record"
NO = ("no", "false", "0", "off")
# The roles that messages of training data may have.
ROLES = ("system", "user", "assistant")
TAIL = 1 << 16  # bytes that are searched for a line break at a time
# False if the header of the current request says that it must not be recorded.
allowed: ContextVar[bool] = ContextVar("allowed", default=True)
log = logging.getLogger(__name__)


class Recorder:
    """Appends lines to a file that only its owner can read; several servers may append to the same file.

    A line is written whole or not at all. If a writer was killed within a line, the next line replaces the
    incomplete line. weights: the text that `answerer` returns for the model. `medusa tune` finds the model's answers by
    this text.
    """

    def __init__(self, path: Path, weights: str) -> None:
        self._path = path
        self._weights = weights
        self._file = self._open()
        self._moved = False

    def _open(self) -> int:
        """Opens the file, or makes a new one; raises UserError if the path is not a regular file."""
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise UserError(f"@record {self._path} is not a regular file", "give another file")
        os.fchmod(file, 0o600)
        return file

    def reopen(self) -> None:
        """Makes `keep` open the path again, because the file may have been moved; signal handlers may call this."""
        self._moved = True

    def keep(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: Sequence[int],
        kind: str,
        answer: Answer,
        tokens: Sequence[int],
    ) -> None:
        """Records an answer's tokens; failures are only logged, because the client must get its answer in any case."""
        if not tokens:
            return
        messages = messages_of(body)
        if messages:
            messages.append({"role": "assistant", "content": answer.text})
        ids = [*prompt, *tokens]
        record = {
            "id": uuid.uuid4().hex,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": kind,
            "weights": self._weights,
            "messages": messages,
            "tokens": ids,
            "spans": [[len(prompt), len(ids)]],
        }
        try:
            self._append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        except OSError as reason:
            log.warning(f"@record {self._path} cannot be written: {reason.strerror}")

    def _append(self, line: bytes) -> None:
        if self._moved:
            self._moved = False
            os.close(self._file)
            self._file = self._open()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        size = whole_size(self._file)
        try:
            os.ftruncate(self._file, size)
            while line:
                line = line[os.write(self._file, line) :]
        except OSError:
            os.ftruncate(self._file, size)  # part of a line may have been written to a full disk
            raise
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def whole_size(file: int) -> int:
    """Returns the size of a file up to its last line break, without an incomplete last line."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - TAIL)
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def answerer(identity: Mapping[str, Any]) -> str:
    """Returns a text that identifies everything that changes a model's answers: weights, adapter and quantization."""
    parts = (identity.get(key) for key in ("weights", "adapter", "rounding"))
    return "+".join(str(part) for part in parts if part)


def messages_of(body: ChatRequest | CompletionRequest) -> list[dict[str, Any]]:
    """Returns a chat's messages; an empty list if one calls a tool or has a role outside ROLES, and for completions."""
    if isinstance(body, CompletionRequest):
        return []
    messages = [message.plain for message in body.messages]
    if any(message["role"] not in ROLES or "tool_calls" in message for message in messages):
        return []
    return [{key: message[key] for key in ("role", "content")} for message in messages]


def kind_of(body: ChatRequest | CompletionRequest, grammar: Grammar | LazyGrammar | None) -> str:
    """Returns the kind of a request: tools, structured, chat or completion. Acceptance is reported by kind."""
    if isinstance(body, ChatRequest) and body.offered:
        return "tools"
    if grammar is not None:
        return "structured"
    return "chat" if isinstance(body, ChatRequest) else "completion"
