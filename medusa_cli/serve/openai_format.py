"""Answers in OpenAI's form, whole or in chunks; fields beyond OpenAI's stand under "medusa"."""

import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from medusa_cli.decode import Likelihood, Stats
from medusa_cli.decode.answer import REPLACEMENT
from medusa_cli.model import Backbone
from medusa_cli.serve.errors import failure
from medusa_cli.serve.scheduler import Event, Ticket
from medusa_cli.serve.schema import ChatRequest, CompletionRequest
from medusa_cli.serve.tools import CallReader

# OpenAI's value for an impossible token: JSON has no infinity.
NEVER = -9999.0
MAX_CHARACTER_BYTES = 4


def sse(data: dict[str, Any], name: str | None = None) -> str:
    """Returns a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    # In ASCII: many clients take U+2028 and its like, which JSON may hold, for the end of a line.
    return f"{head}data: {json.dumps(data)}\n\n"


class OpenAIFormat:
    """Formats the answers to one request: all chunks have the same id, time and model, and each choice its index."""

    def __init__(self, backbone: Backbone, body: ChatRequest | CompletionRequest, tickets: Sequence[Ticket]) -> None:
        self._chat, self._tickets, self._n = isinstance(body, ChatRequest), tickets, body.n
        self._tokens = [TokenTexts(backbone) for _ in tickets]
        self._offsets = [0] * len(tickets)  # characters of each answer so far
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created, self._model = int(time.time()), body.model
        self._stream_usage = body.stream_options is not None and body.stream_options.include_usage
        names = [tool["function"]["name"] for tool in body.offered] if isinstance(body, ChatRequest) else []
        self._calls = [CallReader(names) if names else None for _ in tickets]
        self._echoes = [""] * len(tickets)
        if isinstance(body, CompletionRequest) and body.echo:
            texts = [text if isinstance(text, str) else backbone.decode(text) for text in body.prompts]
            self._echoes = [text for text in texts for _ in range(body.n)]

    async def stream(self, events: AsyncGenerator[tuple[int, Event]]) -> AsyncIterator[str]:
        """Yields the answers as server-sent events, one a step of a choice."""
        no_usage = {"usage": None} if self._stream_usage else {}
        async with aclosing(events):
            delta = {"delta": {"role": "assistant", "content": ""}}
            for index, text in enumerate(self._echoes):
                if self._chat or text:  # the role, or what is echoed, comes before the first text
                    choice = self._choice(index, delta if self._chat else {"text": text}, None, None)
                    yield sse({**self._body([choice]), **no_usage})
            async for index, event in events:
                if event.error is not None:
                    yield sse(failure(event.error).body)
                    return
                if event.pieces or event.likelihoods or event.last:
                    yield sse({**self.chunk(index, event), **no_usage})
        if self._stream_usage:  # after the last choice, alone
            yield sse({**self._body([]), "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        """Returns the finished answers."""
        choices = []
        for index, ticket in enumerate(self._tickets):
            answer = ticket.answer
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            if calls := self._calls[index]:
                read = calls.feed(answer.text, last=True)
                for call in read.get("tool_calls", ()):
                    del call["index"]
                message |= {"content": None if calls.count else "", **read}
            content = {"message": message} if self._chat else {"text": self._echoes[index] + answer.text}
            choices.append(self._choice(index, content, answer.likelihoods, answer.finish_reason))
        return {**self._body(choices, "chat.completion"), "usage": self._usage()}

    def chunk(self, index: int, event: Event) -> dict[str, Any]:
        """Returns the chunk of one step of a choice."""
        text = "".join(piece.text for piece in event.pieces)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls := self._calls[index]:
            delta = calls.feed(text, event.last)
        content: dict[str, Any] = {"delta": delta} if self._chat else {"text": text}
        reason = self._tickets[index].answer.finish_reason if event.last else None
        choice = self._choice(index, content, event.likelihoods, reason)
        return {**self._body([choice]), "medusa": {"pieces": [[piece.text, piece.accepted] for piece in event.pieces]}}

    def _body(self, choices: list[dict[str, Any]], kind: str = "chat.completion.chunk") -> dict[str, Any]:
        kind = kind if self._chat else "text_completion"
        return {"id": self._id, "created": self._created, "model": self._model, "object": kind, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        """Returns token counts, each prompt's once, and how many draft tokens were accepted."""
        prompts = self._tickets[:: self._n]
        stats, prompt = Stats(), sum(len(ticket.request.prompt) for ticket in prompts)
        for ticket in self._tickets:
            stats += ticket.answer.stats
        return {
            "prompt_tokens": prompt,
            "completion_tokens": stats.tokens,
            "total_tokens": prompt + stats.tokens,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.reused for ticket in prompts)},
            "medusa": {
                "drafted_tokens": stats.drafted,
                "accepted_tokens": stats.accepted,
                "steps": stats.steps,
                "acceptance_length": round(stats.acceptance_length, 4),
            },
        }

    def _choice(
        self, index: int, text: dict[str, Any], likelihoods: Sequence[Likelihood] | None, reason: str | None
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._tickets[index].request.top is not None and likelihoods is not None:
            rows = [self._tokens[index].row(likelihood) for likelihood in likelihoods]
            if self._chat:
                content = [
                    {**_entry(*token), "top_logprobs": [_entry(*other) for other in top]} for token, *top in rows
                ]
                logprobs = {"content": content, "refusal": None}
            else:
                logprobs = self._completion_logprobs(index, rows)
        if reason == "stop" and (calls := self._calls[index]) and calls.count:
            reason = "tool_calls"
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}

    def _completion_logprobs(self, index: int, rows: "list[list[TokenLogprob]]") -> dict[str, Any]:
        offsets, likeliest = list[int](), list[dict[str, float | None] | None]()
        for (text, own), *top in rows:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
            # The likeliest comes first: of tokens with one text it is the one that stays.
            likeliest.append(None if own is None else {text: logprob for text, logprob in reversed(top)})
        return {
            "tokens": [row[0][0] for row in rows],
            "token_logprobs": [row[0][1] for row in rows],
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }


TokenLogprob = tuple[str, float | None]


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    # A part of a character has no text of its own, and not every tokenizer tells its bytes.
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class TokenTexts:
    """Decodes tokens in their context: decoders of the Llama kind strip the blank of a token decoded alone."""

    def __init__(self, backbone: Backbone) -> None:
        self._tokenizer = backbone.tokenizer
        self._before: list[int] = []  # the last tokens, from a whole character on
        self._text = ""  # their text

    def row(self, likelihood: Likelihood) -> list[TokenLogprob]:
        """Returns text and log probability of the answer's next token, then of the likeliest tokens in its place."""
        entries = [(likelihood.token, likelihood.logprob), *likelihood.top]
        texts = {token: self._in_context(token) for token, _ in entries}
        partial = self._decode([likelihood.token]).endswith(REPLACEMENT)
        self._before = [*self._before[-MAX_CHARACTER_BYTES:], likelihood.token] if partial else [likelihood.token]
        self._text = self._decode(self._before)
        return [(texts[token], None if math.isnan(logprob) else max(logprob, NEVER)) for token, logprob in entries]

    def _in_context(self, token: int) -> str:
        if not self._text.endswith(REPLACEMENT):
            text = self._decode([*self._before, token])
            if text.startswith(self._text):
                return text[len(self._text) :]
        return self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))
