"""Answers in OpenAI's words, whole or in chunks; what is ours alone stands under "medusa"."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from medusa_cli.decode import Likelihood, Piece
from medusa_cli.decode.stream import REPLACEMENT
from medusa_cli.model import Backbone
from medusa_cli.serve.scheduler import Ticket

# What OpenAI says for a token that cannot be: JSON knows no infinity.
NEVER = -9999.0
# Bytes that a character has at most.
MOST_BYTES = 4


class OpenAIFormat:
    """One answer's id, time and model, for every chunk alike."""

    def __init__(self, backbone: Backbone, model: str, *, chat: bool) -> None:
        self._backbone, self._chat = backbone, chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._written = 0
        self._before: list[int] = []  # the answer's last tokens, from a whole character on
        self._read = ""  # their text

    def whole(self, ticket: Ticket) -> dict[str, Any]:
        """The answer at once."""
        reply = ticket.reply
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": reply.text, "refusal": None}}
            if self._chat
            else {"text": reply.text}
        )
        choice = self._choice(content, ticket, reply.likelihoods, reply.reason)
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": usage(ticket)}

    def opening(self) -> list[dict[str, Any]]:
        """What comes before the first text: in a chat, who speaks."""
        return [self._chunk([_bare({"delta": {"role": "assistant", "content": ""}})])] if self._chat else []

    def chunk(
        self, ticket: Ticket, pieces: Sequence[Piece], likely: Sequence[Likelihood], last: bool
    ) -> dict[str, Any]:
        """What one step added."""
        text = "".join(piece.text for piece in pieces)
        content: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        choice = self._choice(content, ticket, likely, ticket.reply.reason if last else None)
        return {**self._chunk([choice]), "medusa": {"pieces": [[piece.text, piece.accepted] for piece in pieces]}}

    def closing(self, ticket: Ticket) -> dict[str, Any]:
        """The chunk after the last, with the usage alone."""
        return {**self._chunk([]), "usage": usage(ticket)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": choices,
        }

    def _choice(
        self, content: dict[str, Any], ticket: Ticket, likely: Sequence[Likelihood], reason: str | None
    ) -> dict[str, Any]:
        choice = {**_bare(content), "finish_reason": reason}
        if ticket.request.top is not None:
            choice["logprobs"] = self._content(likely) if self._chat else self._columns(likely)
        return choice

    def _content(self, likely: Sequence[Likelihood]) -> dict[str, Any]:
        """Log probabilities as chats have them."""
        rows = []
        for one in likely:
            top = [self._entry(*other) for other in one.top]
            rows.append({**self._entry(one.token, one.logprob), "top_logprobs": top})
            self._pass(one.token)
        return {"content": rows, "refusal": None}

    def _columns(self, likely: Sequence[Likelihood]) -> dict[str, Any]:
        """Log probabilities as completions have them."""
        words, offsets, others = list[str](), list[int](), list[dict[str, float]]()
        for one in likely:
            words.append(self._word(one.token))
            offsets.append(self._written)
            others.append({})
            for token, value in one.top:  # falling: of those that read alike the likeliest stands
                others[-1].setdefault(self._word(token), max(value, NEVER))
            self._written += len(words[-1])
            self._pass(one.token)
        return {
            "tokens": words,
            "token_logprobs": [max(one.logprob, NEVER) for one in likely],
            "top_logprobs": others,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        # A part of a character has no text of its own, and its bytes are not to be had from every tokenizer.
        return {
            "token": word,
            "logprob": max(logprob, NEVER),
            "bytes": None if REPLACEMENT in word else list(word.encode()),
        }

    def _word(self, token: int) -> str:
        """A token's text in its place: decoders of the Llama kind strip the blank of one that they decode alone."""
        if not self._read.endswith(REPLACEMENT):
            both = self._decoded([*self._before, token])
            if both.startswith(self._read):
                return both[len(self._read) :]
        return self._decoded([token])

    def _pass(self, token: int) -> None:
        """Go on behind a token."""
        part = self._decoded([token]).endswith(REPLACEMENT)
        self._before = [*self._before[-MOST_BYTES:], token] if part else [token]
        self._read = self._decoded(self._before)

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._backbone.tokenizer.decode(tokens))


def usage(ticket: Ticket) -> dict[str, Any]:
    """Tokens in OpenAI's words, and what drafting came to."""
    stats, prompt = ticket.reply.stats, len(ticket.request.prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": stats.tokens,
        "total_tokens": prompt + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": ticket.reused},
        "medusa": {
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted,
            "steps": stats.steps,
            "acceptance_rate": round(stats.acceptance_rate, 4),
        },
    }


def _bare(content: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": None}
