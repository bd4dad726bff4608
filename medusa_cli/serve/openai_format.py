"""Answers in OpenAI's format, whole or in chunks; fields specific to this server are under "medusa"."""

import hashlib
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from medusa_cli import __version__
from medusa_cli.decode import Answer, Likelihood, Stats
from medusa_cli.decode.text_stream import REPLACEMENT
from medusa_cli.model import Backbone
from medusa_cli.serve.answer_format import KEEP_ALIVE, sse
from medusa_cli.serve.calls import CallReader
from medusa_cli.serve.chats import ChatRequest
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.refusals import failure
from medusa_cli.serve.scheduler import WAITING, Event, Ticket

# The log probability that OpenAI reports for an impossible token, because JSON has no infinity.
NEVER = -9999.0
MAX_CHARACTER_BYTES = 4


class TokenLogprob(NamedTuple):
    """Holds a token, its text in context, and its log probability, which is None for a prompt's first token."""

    id: int
    text: str
    logprob: float | None


class OpenAIFormat:
    """Formats the answers to one request. All chunks have the same id, time and model; each choice has an index."""

    media = "text/event-stream"

    def __init__(
        self, backbone: Backbone, body: ChatRequest | CompletionRequest, tickets: Sequence[Ticket]
    ) -> None:
        self._chat = isinstance(body, ChatRequest)
        self._tickets = tickets
        self._n = body.n
        self._asked = body
        self._backbone = backbone
        keep = () if body.skip_special_tokens else backbone.special_ids
        hidden = backbone.special_ids.difference(keep)
        self._tokens = [TokenTexts(backbone, hidden) for _ in tickets]
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = body.model
        self._fingerprint = fingerprint_of(backbone)
        self._stream_usage = body.stream_options.include_usage
        self._continuous = self._stream_usage and body.stream_options.continuous_usage_stats
        # Log probabilities of the prompt come first. They are reported with the answer only if the answer
        # echoes the prompt.
        self._echoes_prompt = isinstance(body, CompletionRequest) and body.echo
        scored = body.prompt_logprobs is not None and not self._echoes_prompt
        self._skip = [len(ticket.request.prompt) if scored else 0 for ticket in tickets]
        names = body.offered_names if isinstance(body, ChatRequest) else []
        self._calls = [CallReader(names) if names else None for _ in tickets]
        self._echoes: list[str] = []
        if isinstance(body, CompletionRequest) and body.echo:
            for text in body.prompts:
                echo = text if isinstance(text, str) else backbone.decode(text, keep)
                self._echoes += [echo] * body.n
        else:
            echo = body.echoed if isinstance(body, ChatRequest) else ""
            self._echoes = [echo] * len(tickets)

    async def stream(self, events: AsyncGenerator[tuple[int, Event]]) -> AsyncIterator[str]:
        """Yields the answers as server-sent events, one per step of a choice."""

        def usage() -> dict[str, Any]:
            if self._continuous:
                return {"usage": self._usage()}
            return {"usage": None} if self._stream_usage else {}

        async with aclosing(events):
            with_ids = self._asked.return_token_ids
            # The role, or the echoed prompt, comes before the first text. An echoed prompt waits for
            # its log probabilities.
            scored = self._echoes_prompt and self._asked.top is not None
            unsent = set(range(len(self._echoes))) if scored else set[int]()
            for index, text in enumerate(self._echoes):
                if index not in unsent and (self._chat or text or with_ids):
                    yield sse({**self._first_chunk(index), **usage()})
            async for index, event in events:
                if event.error is not None:
                    yield sse(failure(event.error).body)
                    return
                if event is WAITING:
                    yield KEEP_ALIVE
                    continue
                if event.progress is not None:
                    chunk = {**self.chunk(index, event), "prompt_progress": asdict(event.progress)}
                    yield sse({**chunk, **usage()})
                    continue
                if index in unsent:
                    unsent.remove(index)
                    length = len(self._tickets[index].request.prompt)
                    prompt, others = event.likelihoods[:length], event.likelihoods[length:]
                    chunk = await run_in_threadpool(self._first_chunk, index, prompt)
                    yield sse({**chunk, **usage()})
                    event = replace(event, likelihoods=others)
                if event.pieces or event.likelihoods or event.last or with_ids:
                    yield sse({**self.chunk(index, event), **usage()})
        if self._stream_usage:  # after the last choice, in a separate chunk
            yield sse({**self._body([]), "usage": self._usage(), **self._metrics()})
        yield "data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        """Returns the response body with the finished answers."""
        choices = []
        for index, ticket in enumerate(self._tickets):
            answer = ticket.answer
            text = self._echoes[index] + answer.text
            message = {"role": "assistant", "content": text, "refusal": None}
            if calls := self._calls[index]:
                read = calls.feed(answer.text, last=True)
                for call in read.get("tool_calls", ()):
                    del call["index"]
                message |= read
                message["content"] = self._echoes[index] + read.get("content", "")
                if calls.count and not message["content"]:
                    message["content"] = None
            content = {"message": message} if self._chat else {"text": text}
            choice = self._choice(
                index, content, answer.likelihoods, answer.finish_reason, answer.tokens
            )
            choices.append(choice)
        more: dict[str, Any] = {}
        for index, choice in enumerate(choices):
            more |= self._prompt_ids(choice, index)
            more |= self._prompt_logprobs(choice, index)
        body = self._body(choices, "chat.completion")
        return {**body, **more, "usage": self._usage(), **self._metrics()}

    def _first_chunk(
        self, index: int, prompt: Sequence[Likelihood] | None = None
    ) -> dict[str, Any]:
        """Returns a choice's first chunk, with the role, or with the echoed prompt and its log probabilities."""
        text = self._echoes[index]
        delta: dict[str, Any] = {"text": text}
        if self._chat:
            # The answer may be a tool call, to which clients would add an empty text.
            content = text or (None if self._calls[index] else "")
            delta = {"delta": {"role": "assistant", "content": content}}
        choice = self._choice(index, delta, prompt, None)
        return {**self._body([choice]), **self._prompt_ids(choice, index)}

    def chunk(self, index: int, event: Event) -> dict[str, Any]:
        """Returns the chunk for one step of a choice."""
        text = event.text
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls := self._calls[index]:
            delta = calls.feed(text, event.last)
        content: dict[str, Any] = {"delta": delta} if self._chat else {"text": text}
        reason = self._tickets[index].answer.finish_reason if event.last else None
        choice = self._choice(index, content, event.likelihoods, reason, event.tokens)
        return {
            **self._body([choice]),
            "medusa": {"pieces": [[piece.text, piece.accepted] for piece in event.pieces]},
        }

    def _body(
        self, choices: list[dict[str, Any]], kind: str = "chat.completion.chunk"
    ) -> dict[str, Any]:
        kind = kind if self._chat else "text_completion"
        own = {"id": self._id, "created": self._created, "model": self._model, "object": kind}
        return {**own, "system_fingerprint": self._fingerprint, "choices": choices}

    def _prompt_ids(self, choice: dict[str, Any], index: int) -> dict[str, Any]:
        """Adds the prompt's token ids to a choice; for a chat, whose choices share one prompt, returns them instead."""
        if not self._asked.return_token_ids:
            return {}
        return self._of_prompt(choice, "prompt_token_ids", [*self._tickets[index].request.prompt])

    def _prompt_logprobs(self, choice: dict[str, Any], index: int) -> dict[str, Any]:
        """Adds the prompt's log probabilities to a choice, as vLLM does; for a chat, returns them instead."""
        wanted = self._asked.prompt_logprobs
        if wanted is None:
            return {}
        ticket = self._tickets[index]
        rows: list[dict[str, Any] | None] = []
        for likelihood in ticket.answer.likelihoods[: len(ticket.request.prompt)]:
            entries: dict[str, Any] = {}
            for rank, (token, logprob) in enumerate(likelihood.top[:wanted], 1):
                entries[str(token)] = self._prompt_entry(token, logprob, rank)
            # The token's rank is known only if the token is among the likeliest.
            entries.setdefault(
                str(likelihood.token),
                self._prompt_entry(likelihood.token, likelihood.logprob, None),
            )
            rows.append(entries)
        if rows:  # nothing predicts the first token
            rows[0] = None
        return self._of_prompt(choice, "prompt_logprobs", rows)

    def _of_prompt(self, choice: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
        if self._chat:
            return {field: value}
        choice[field] = value
        return {}

    def _prompt_entry(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = str(self._backbone.tokenizer.decode([token]))
        return {"logprob": max(logprob, NEVER), "rank": rank, "decoded_token": text}

    def _usage(self) -> dict[str, Any]:
        """Returns the token counts, with each prompt counted once, and how many draft tokens were accepted."""
        prompts = self._tickets[:: self._n]
        tokens = sum(ticket.answer.stats.tokens for ticket in self._tickets)
        prompt = sum(len(ticket.request.prompt) for ticket in prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.reused for ticket in prompts)},
            "medusa": speculative_figures(self._tickets, by_position=self._asked.drafts.figures),
        }

    def _metrics(self) -> dict[str, Any]:
        """Returns the acceptance figures of a single answer with drafts, in the per-request format of vLLM.

        guidellm and AIPerf read this format. Returns an empty dict for several answers, or without drafts.
        """
        [ticket, *others] = self._tickets
        if others or not ticket.drafts:
            return {}
        return {"metrics": {"speculative_decoding": acceptance(ticket)}}

    def _choice(
        self,
        index: int,
        text: dict[str, Any],
        likelihoods: Sequence[Likelihood] | None,
        reason: str | None,
        tokens: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        body = self._asked
        logprobs: dict[str, Any] | None = None
        if body.top is not None and likelihoods is not None:
            if reason is not None and self._tickets[index].answer.end_hidden:
                likelihoods = self._without_end(likelihoods)
            skipped = min(self._skip[index], len(likelihoods))
            self._skip[index] -= skipped
            logprobs = self._logprobs(index, likelihoods[skipped:], body.top)
        if reason == "stop" and (calls := self._calls[index]) and calls.count:
            reason = "tool_calls"
        ids = {"token_ids": [*tokens]} if body.return_token_ids and tokens is not None else {}
        choice = {"index": index, **text, "logprobs": logprobs, **ids, "finish_reason": reason}
        return choice if reason is None else {**choice, **self._stop_of(index)}

    def _stop_of(self, index: int) -> dict[str, Any]:
        """Returns the stop string or token id that ended an answer, or null, under the names of vLLM and SGLang.

        If an end token of the model ended the answer, only SGLang's field reports the token.
        """
        answer = self._tickets[index].answer
        if answer.finish_reason != "stop":
            return {"stop_reason": None, "matched_stop": None}
        if stop := stop_string_of(self._backbone, answer, self._asked.stop_strings):
            return {"stop_reason": stop, "matched_stop": stop}
        last = answer.tokens[-1]
        asked = last in self._asked.stop_token_ids
        ends = asked or last in self._backbone.eos_ids
        return {"stop_reason": last if asked else None, "matched_stop": last if ends else None}

    def _without_end(self, likelihoods: Sequence[Likelihood]) -> Sequence[Likelihood]:
        """Returns the log probabilities without the end token's, because the text does not show the end token.

        After an echoed prompt the end token is listed: lm-eval expects one entry for each token.
        """
        return likelihoods if self._echoes_prompt else likelihoods[:-1]

    def _logprobs(self, index: int, likelihoods: Sequence[Likelihood], top: int) -> dict[str, Any]:
        texts = self._tokens[index]
        if self._chat:
            content = []
            for likelihood in likelihoods:
                entry, *likeliest = map(self._entry, texts.row(likelihood, top))
                content.append({**entry, "top_logprobs": likeliest})
            return {"content": content, "refusal": None}
        offsets = list[int]()
        tokens = list[TokenLogprob]()
        own_bytes = list[list[int] | None]()
        top_logprobs = list[dict[str, float | None] | None]()
        for likelihood in likelihoods:
            offsets.append(texts.place(likelihood.token))
            first, *others = texts.row(likelihood, top)
            tokens.append(first)
            own_bytes.append(self._bytes_of(first))
            # If several tokens have the same text, the likeliest is kept: it is written last here.
            # The answer's token is always reported.
            row = {other.text: other.logprob for other in reversed(others)}
            if first.logprob is not None:
                row.setdefault(first.text, first.logprob)
            top_logprobs.append(None if first.logprob is None else row)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
            "bytes": own_bytes,
        }

    def _entry(self, token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": self._bytes_of(token)}

    def _bytes_of(self, token: TokenLogprob) -> list[int] | None:
        """Returns the token's own bytes, even if it is a part of a character and has no text of its own."""
        own = self._backbone.vocabulary.bytes_of(token.id)
        if own is None:
            return None if REPLACEMENT in token.text else list(token.text.encode())
        return list(own)


def stop_string_of(backbone: Backbone, answer: Answer, stops: Sequence[str]) -> str | None:
    """Returns the stop string that ended an answer with the finish reason "stop"; None if no stop string did."""
    whole = backbone.decode(answer.tokens, backbone.special_ids)
    matches = [(whole.find(stop), stop) for stop in stops if stop in whole]
    return min(matches)[1] if matches else None


def speculative_figures(tickets: Sequence[Ticket], by_position: bool = False) -> dict[str, Any]:
    """Returns the draft-token counts of one request's answers.

    by_position: also return the number of steps with drafts, how many of them accepted a token at
    each position, and the seconds taken by prefill, drafting and verification.
    """
    stats = Stats()
    for ticket in tickets:
        stats += ticket.answer.stats
    figures: dict[str, Any] = {
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "steps": stats.steps,
        "acceptance_length": round(stats.acceptance_length, 4),
    }
    if by_position:
        columns = zip_longest(*(ticket.accepted_at for ticket in tickets), fillvalue=0)
        figures["drafts"] = sum(ticket.drafts for ticket in tickets)
        figures["accepted_per_pos"] = [*map(sum, columns)]
        for name in ("prefill_s", "draft_s", "verify_s"):
            figures[name] = round(getattr(stats, name), 6)
    return figures


def acceptance(ticket: Ticket) -> dict[str, Any]:
    """Returns an answer's acceptance figures under vLLM's names; tree nodes except the root count as draft tokens."""
    stats = ticket.answer.stats
    # Numbers of steps that accepted at least 0, 1, 2, ... draft tokens.
    reached = [ticket.drafts, *ticket.accepted_at]
    return {
        "mean_acceptance_length": 1 + stats.accepted / ticket.drafts,
        "draft_acceptance_rate": stats.accepted / stats.drafted,
        "acceptance_histogram": [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
        "num_spec_steps": ticket.drafts,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(ticket.accepted_at),
    }


def fingerprint_of(backbone: Backbone) -> str:
    """Returns a fingerprint of everything that may change an answer: model, number type, engine and version."""
    given = [backbone.identity, str(backbone.dtype), backbone.engine.title, __version__]
    return f"fp_{hashlib.sha256(json.dumps(given, default=str).encode()).hexdigest()[:10]}"


class TokenTexts:
    """Decodes tokens in context, because Llama's decoder strips the leading space of a single token.

    hidden: special tokens that do not appear in the answer's text.
    """

    def __init__(self, backbone: Backbone, hidden: Collection[int] = ()) -> None:
        self._tokenizer = backbone.tokenizer
        self._hidden = hidden
        self._before: list[int] = []  # the last tokens, from the start of a character
        self._text = ""  # their text
        self._offset = 0  # characters of the answer's text before `_unfinished`
        self._unfinished: list[int] = []  # tokens of an incomplete character
        self._finished: list[int] = []  # the tokens before `_unfinished`

    def row(self, likelihood: Likelihood, top: int) -> list[TokenLogprob]:
        """Returns the text and log probability of the answer's next token, then those of the likeliest tokens."""
        entries = [(likelihood.token, likelihood.logprob), *likelihood.top[:top]]
        texts = {token: self._in_context(token) for token, _ in entries}
        partial = self._decode([likelihood.token]).endswith(REPLACEMENT)
        before = self._before[-MAX_CHARACTER_BYTES:] if partial else []
        self._before = [*before, likelihood.token]
        self._text = self._decode(self._before)
        return [
            TokenLogprob(token, texts[token], None if math.isnan(logprob) else max(logprob, NEVER))
            for token, logprob in entries
        ]

    def place(self, token: int) -> int:
        """Adds the answer's next token; returns its offset in the text. Tokens of one character have equal offsets."""
        place = self._offset
        if token in self._hidden:
            return place
        self._unfinished.append(token)
        before = self._decode(self._finished)
        text = self._decode([*self._finished, *self._unfinished]).removeprefix(before)
        if not text.endswith(REPLACEMENT) or len(self._unfinished) >= MAX_CHARACTER_BYTES:
            self._offset += len(text)
            self._finished = self._unfinished
            self._unfinished = []
        return place

    def _in_context(self, token: int) -> str:
        if not self._text.endswith(REPLACEMENT):
            text = self._decode([*self._before, token])
            if text.startswith(self._text):
                return text[len(self._text) :]
        return self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))
