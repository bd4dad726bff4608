"""The Python API: a model with its drafter, and what it answers: at once, as it comes, or many prompts side by side."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.assembly import Assembled, assemble
from medusa_cli.backbone.dialogue import token_ids
from medusa_cli.decoding import Decoder, Likelihood, Lookup, Pace, Piece, Reply, Request, Stats
from medusa_cli.decoding.sampling import sampling_of
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.resolve import choose, find_drafter

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class Answer:
    """An answer's text and token ids, why it ended ("stop", "length" or "cancelled"), and what it took.

    A stop string is no part of the text; the token that completes it, and an end token, are among the tokens.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    prompt_tokens: int
    likelihoods: list[Likelihood]


class Medusa:
    """A backbone with a drafter and a tree that fit it, ready to answer. May be used by several threads in turn."""

    def __init__(self, made: Assembled) -> None:
        self.made = made
        self.backbone = made.backbone
        self._idle: list[Decoder] = []
        self._turn = threading.RLock()  # passes share buffers: one at a time

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        drafter: str | Path | None = "auto",
        run: str | Path | None = None,
        tree: str | Path | None = None,
        lookup: bool | None = None,
        device: str = "auto",
        dtype: str = "auto",
        engine: str = "auto",
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        trust_remote_code: bool = False,
    ) -> "Medusa":
        """Load a model (a named one, a folder, a hub id) with what drafts for it; each word as on the command line.

        drafter: a run, a folder, a hub id; left out: the run's, else the one that ships; None: plain decoding. lookup:
        whether what the text repeats is drafted, too, and alone where there is no drafter. Without
        a model the run's is taken, else the default one. Raises UserError for what cannot be found or does not fit.
        """
        source, folder = (None, None) if drafter in (None, "auto") else find_drafter(str(drafter))
        if run is not None and source is not None:
            raise UsageError("@run and @drafter name a run each", "leave one of them out")
        choice = choose(
            None if model is None else str(model),
            source if run is None else str(run),
            folder,
            None if tree is None else str(tree),
            need_drafter=drafter is not None,
            lookup=lookup,
        )
        made = assemble(
            choice,
            device=device,
            dtype=dtype,
            engine=engine,
            load_in_4bit=load_in_4bit,
            load_in_8bit=load_in_8bit,
            trust_remote_code=trust_remote_code,
        )
        return cls(made)

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: str | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Iterable[int] | None = None,
        logprobs: int | None = None,
        raw: bool = False,
    ) -> Request:
        """What stream, generate and batch decode: a prompt as token ids, and its rules.

        prompt: messages (role, content), token ids, or a text, which is taken for a user's message, or, with raw or
        where the model has no chat template, is continued as it stands. Greedy without a temperature. stop: texts that
        end the answer; stop_ids: token ids that do, in place of the model's own. logprobs: how many of the likeliest
        tokens to tell beside each. Raises UsageError for what cannot be.
        """
        if logprobs is not None and logprobs < 0:
            raise UsageError(f"@logprobs {logprobs} cannot be", "use 0 or more, or None")
        return Request(
            tuple(self.encode(prompt, raw=raw)),
            max_new_tokens,
            sampling_of(sampling, temperature, top_p, top_k, seed),
            None if stop_ids is None else frozenset(stop_ids),
            (stop,) if isinstance(stop, str) else tuple(stop),
            logprobs,
        )

    def stream(self, prompt: Prompt | Request, **rules: Any) -> "Stream":
        """The answer's text as it comes; the rules are those of `request`. The prompt is read before this returns."""
        return Stream(self, self._request(prompt, rules))

    def generate(self, prompt: Prompt | Request, **rules: Any) -> Answer:
        """The whole answer; the rules are those of `request`."""
        with self.stream(prompt, **rules) as stream:
            for _ in stream:
                pass
        return stream.answer

    def chat(self, messages: Sequence[Mapping[str, str]], **rules: Any) -> Answer:
        """The answer to a conversation's last message. Turns of one conversation read only what is new of it."""
        return self.generate(messages, **rules)

    def batch(self, prompts: Sequence[Prompt], *, batch_size: int = 8, **rules: Any) -> list[Answer]:
        """The answers to many prompts, batch_size at a time: what each gets alone, drawn with seed plus its number."""
        if batch_size < 1:
            raise UsageError(f"@batch_size {batch_size} is too small", "use 1 or more")
        asked = [self._request(prompt, rules) for prompt in prompts]
        replies = [Reply(self.backbone, request.stop_strings) for request in asked]
        with self._turn:
            decoder = self.decoder(max(1, min(batch_size, len(asked))))
            for number, request in enumerate(asked):
                while not decoder.room:
                    _go_on(decoder, replies)
                sequence, first = request.admit(decoder, number)
                replies[number].add(first, sequence.ending.reason)
            while decoder.rows:
                _go_on(decoder, replies)
        return [_answer(reply, request) for reply, request in zip(replies, asked, strict=True)]

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt, as `request` reads it; UserError where it is none."""
        if isinstance(prompt, str):
            if not raw and getattr(self.backbone.tokenizer, "chat_template", None):
                return self.backbone.encode_chat([{"role": "user", "content": prompt}])
            return token_ids(self.backbone, prompt, begin=True)
        if prompt and all(isinstance(one, Mapping) for one in prompt):
            return self.backbone.encode_chat([_message(one) for one in prompt])  # type: ignore[arg-type]
        ids = [one for one in prompt if isinstance(one, int) and 0 <= one < self.backbone.vocab_size]
        if len(ids) < len(prompt):
            most = self.backbone.vocab_size - 1
            raise UsageError("a prompt is of something else", f"give a text, messages, or token ids from 0 to {most}")
        return ids

    def _request(self, prompt: Prompt | Request, rules: Mapping[str, Any]) -> Request:
        return prompt if isinstance(prompt, Request) else self.request(prompt, **rules)

    def decoder(self, slots: int = 1) -> Decoder:
        """A decoder of its own, for so many sequences side by side."""
        shape = self.made.shape
        shape = shape.fork() if isinstance(shape, Pace | Lookup) else shape  # whose texts under way are its own
        return Decoder(self.backbone, self.made.drafter, shape, slots=slots)

    @contextmanager
    def _turns(self) -> Iterator[list[Decoder]]:
        """One thread at a time, with the decoders of one slot that nobody uses."""
        with self._turn:
            yield self._idle


class Stream:
    """An answer as it comes: yields its text, a step at a time. Closing it, or letting go of it, cancels the rest."""

    def __init__(self, medusa: Medusa, request: Request) -> None:
        self._medusa, self._request = medusa, request
        self._reply = Reply(medusa.backbone, request.stop_strings)
        self._decoder: Decoder | None = None
        with medusa._turns() as idle:
            # The decoder used last: what it holds of a conversation is most likely asked for again.
            decoder = idle.pop() if idle else medusa.decoder()
            try:
                self._sequence, first = request.admit(decoder)
            except UserError:
                idle.append(decoder)
                raise
            self._decoder = decoder
        self._first: list[Piece] | None = self._reply.add(first, self._sequence.ending.reason)
        self.reused = self._sequence.reused

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        while (pieces := self.step()) is not None:
            if text := "".join(piece.text for piece in pieces):
                return text
        raise StopIteration

    def step(self) -> list[Piece] | None:
        """The text of the next step's tokens, with which of them were drafted; None after the end."""
        if self._first is not None:
            pieces, self._first = self._first, None
            return pieces
        if self._reply.reason or self._decoder is None:
            self.close()
            return None
        with self._medusa._turns():
            [(_, step)] = self._decoder.step()
        return self._reply.add(step, self._sequence.ending.reason)

    def close(self) -> None:
        """End the answer where it is, unless it has ended."""
        self._reply.leave()
        if self._decoder is not None:
            with self._medusa._turns() as idle:
                self._decoder.cancel(self._sequence)
                idle.append(self._decoder)
            self._decoder = None

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return _answer(self._reply, self._request)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_decoder", None) is not None:
            self.close()


def _go_on(decoder: Decoder, replies: Sequence[Reply]) -> None:
    """One step of a batch, each sequence's to its reply."""
    for sequence, step in decoder.step():
        reply = replies[sequence.number]
        reply.add(step, sequence.ending.reason)
        if reply.reason and not sequence.done:
            decoder.cancel(sequence)


def _answer(reply: Reply, request: Request) -> Answer:
    reason = reply.reason or "cancelled"
    return Answer(reply.text, reply.tokens, reason, reply.stats, len(request.prompt), reply.likelihoods)


def _message(message: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise UsageError(f"{dict(message)!r} is no message", 'give {"role": ..., "content": ...}, both texts')
    return dict(message)
