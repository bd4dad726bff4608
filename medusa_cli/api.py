"""The Python API: loads a model with its drafter and draft policy, then streams, generates and batches answers."""

import asyncio
import gc
import secrets
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack

from medusa_cli.decode import Answer, Decoder, LogitsOptions, Piece, Request, Stats
from medusa_cli.decode.grammar import Grammar
from medusa_cli.decode.lazy_grammar import LazyGrammar
from medusa_cli.decode.prefix_store import PrefixStore
from medusa_cli.decode.processors import LogitsFields, check_ids
from medusa_cli.decode.sampling_options import Sampling, sampling_of
from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.files.hub import hub_left_as_it_was
from medusa_cli.files.model_source import ModelSource
from medusa_cli.loading import LoadedModel, load_model
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import check_system, fit, token_ids
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe_files import template_text
from medusa_cli.runs.resolve import NoDrafter, choose


class Array(Protocol):
    """Stands for a NumPy array or a torch tensor."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Array
MAX_NEW_TOKENS = 512
# Maximum number of idle decoders kept for the next stream. Each decoder holds a KV cache. On a GPU,
# the cache covers the whole context, and the decoder also holds CUDA graphs.
MAX_IDLE = 2
ROLES = ("system", "developer", "user", "assistant", "tool")


class OptionFields(TypedDict, total=False):
    """Holds the fields of GenerationOptions as keyword arguments, for type checkers and editors."""

    max_new_tokens: int
    sampling: str | None
    temperature: float | None
    top_p: float
    top_k: int
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    stop_ids: Iterable[int] | None
    logprobs: int | None
    prompt_logprobs: bool
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    min_new_tokens: int | None
    logit_bias: Mapping[int, float] | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | Grammar | LazyGrammar | None
    speculative: bool
    raw: bool


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(LogitsFields):
    """Holds the options of an answer, which are the keyword arguments of `Medusa.request`.

    Decoding is greedy if no temperature is given. stop: strings that end the answer. stop_ids: end tokens that replace
    the model's own. logprobs: how many of the likeliest tokens to report with each token; log probabilities are the
    model's, before any options change them. prompt_logprobs: also report the prompt's tokens, before the answer's
    tokens; the answer may then be empty. min_p: None uses the value in the model's generation config; this also holds
    for the fields of LogitsFields. json_schema, regex, grammar (Lark or GBNF): constrain the answer. speculative: False
    uses plain decoding. raw: True continues a text as it is, without a chat template. Raises UsageError for invalid
    values.
    """

    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: str | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_ids: Iterable[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | Grammar | LazyGrammar | None = None
    speculative: bool = True
    raw: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed", "logprobs"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise UsageError(f"@{name} {shown(value)} is not a whole number", "give an int")
        if self.logprobs is not None and self.logprobs < 0:
            raise UsageError(f"@logprobs {self.logprobs} is not valid", "use 0 or more, or None")
        self.sampled(0)

    def sampled(self, seed: int) -> Sampling:
        """Returns the sampling parameters with a seed; raises UsageError for values that are not valid together."""
        top_k = None if self.top_k is None else int(self.top_k)
        return sampling_of(self.sampling, self.temperature, self.top_p, top_k, seed, self.min_p)

    def request(self, prompt: Sequence[int], backbone: Backbone) -> Request:
        """Returns the request for a prompt's token ids; raises UsageError for values that do not fit the model."""
        logits_options = self.logits_options
        logits_options.check(backbone)
        stop_ids = None if self.stop_ids is None else frozenset(self.stop_ids)
        check_ids("stop_ids", stop_ids or (), backbone.vocab_size)
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            fault = f"@min_new_tokens {self.min_new_tokens} is more than @max_new_tokens {self.max_new_tokens}"
            raise UsageError(fault, "use a smaller one")
        seed = secrets.randbits(62) if self.seed is None else int(self.seed)
        return Request(
            tuple(prompt),
            self.max_new_tokens,
            self.sampled(seed),
            stop_ids,
            (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            self.logprobs,
            logits_options=logits_options,
            prompt_logprobs=self.prompt_logprobs,
            speculative=self.speculative,
        )

    @property
    def logits_options(self) -> LogitsOptions:
        """Returns the options that change the logits."""
        grammar = self.grammar
        if not isinstance(grammar, Grammar | LazyGrammar):
            grammar = Grammar.of(json_schema=self.json_schema, regex=self.regex, grammar=grammar)
        own = {field.name: getattr(self, field.name) for field in fields(LogitsFields)}
        return LogitsOptions(**own, grammar=grammar)


class Medusa:
    """Generates answers with a model, its drafter and its draft policy. Several threads may use one object in turn."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded: LoadedModel | None = loaded
        self.idle: list[Decoder] = []  # one slot each, the most recently used last
        self.lock = threading.RLock()  # forward passes share buffers, so only one may run at a time
        self.thread = ThreadPoolExecutor(1, "medusa")  # runs the steps of every `astream`
        self.store: PrefixStore | None = None  # keeps the decoders' cached prefixes on disk

    def close(self) -> None:
        """Frees the model, after which the object can no longer be used."""
        if self._loaded is None or self._loaded.backbone.forked:
            self._loaded = None  # without the lock, which a thread of the parent process may hold
            return
        self.thread.shutdown()
        with self.lock:
            if self.store is not None:
                for decoder in self.idle:
                    decoder.prefixes.save()
                self.store.close()
            self.idle.clear()
            self._loaded = None
        gc.collect()  # networks and engines form reference cycles

    def use(self, loaded: LoadedModel) -> None:
        """Switches to the drafter and the policy of `loaded`, which has the same model; frees idle decoders."""
        with self.lock:
            self._loaded = loaded
            self.idle.clear()
            if self.store is not None:  # the store keeps the rows of one drafter
                self.keep_prefixes(self.store.folder, self.store.limit)

    @property
    def loaded(self) -> LoadedModel:
        """Returns the model, drafter and policy; raises UserError after `close`, and in a forked process."""
        if self._loaded is None:
            raise UserError("this Medusa is closed", "load another by Medusa.from_pretrained")
        self._loaded.backbone.check_process()
        return self._loaded

    @property
    def backbone(self) -> Backbone:
        """Returns the model; raises UserError as `loaded` does."""
        return self.loaded.backbone

    def __reduce__(self) -> Any:
        return self.backbone.__reduce__()

    def __enter__(self) -> "Medusa":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    @classmethod
    @hub_left_as_it_was()
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
        quantize: str | None = None,
        kv: str = "fp32",
        exact: bool = False,
        trust_remote_code: bool = False,
        chat_template: str | Path | None = None,
    ) -> "Medusa":
        """Loads a model (a name, a folder, a GGUF file or a hub id) with its drafter.

        Arguments have the same meaning as the command-line options. drafter: a run, a folder or a hub id; "auto": the
        run's drafter, otherwise the drafter that ships for the model, otherwise n-gram drafts; None: plain decoding.
        lookup: whether to draft n-gram matches; this also works without a drafter. model: None uses the run's model,
        otherwise the default model. chat_template: a Jinja file or the template's text. Raises UserError if something
        does not exist or does not fit the model.
        """
        try:
            choice = choose(
                None if model is None else ModelSource.of(str(model)),
                None if run is None else str(run),
                None if drafter in (None, "auto") else str(drafter),
                None if tree is None else str(tree),
                need_drafter=drafter is not None,
                lookup=lookup,
            )
        except NoDrafter as reason:
            if lookup is False or tree is not None:
                raise
            choice = replace(reason.plain, lookup=True)
        if drafter is None and tree is not None:
            raise UsageError(f"@tree {tree} has no effect without a drafter", "leave it out")
        if chat_template is not None:
            choice = replace(choice, chat_template=template_text(str(chat_template)))
        loaded = load_model(
            choice,
            LoadOptions(device, dtype, engine, quantize, trust_remote_code, kv=kv, exact=exact),
        )
        return cls(loaded)

    def request(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **changes: Unpack[OptionFields],
    ) -> Request:
        """Returns the request that `stream`, `generate` and `batch` decode.

        prompt: messages (role, content), token ids or a text. A text becomes a user message. With `raw`, or if the
        model has no chat template, the text is continued as it is. changes: fields of GenerationOptions. Raises
        UsageError for invalid values.
        """
        options = _with(options, "request", changes)
        return options.request(self.encode(prompt, raw=options.raw), self.backbone)

    def stream(
        self,
        prompt: Prompt | Request,
        options: GenerationOptions | None = None,
        **changes: Unpack[OptionFields],
    ) -> "Stream":
        """Returns a stream of the answer's text; accepts a request, or the arguments of `request`.

        The prompt is processed before this method returns.
        """
        return Stream(self, self._request_of(prompt, options, "stream", changes))

    async def astream(
        self,
        prompt: Prompt | Request,
        options: GenerationOptions | None = None,
        **changes: Unpack[OptionFields],
    ) -> AsyncIterator[str]:
        """Yields the answer's text as it is generated. Steps run in a separate thread, so other tasks can continue."""
        _ = self.backbone  # raises UserError after close()
        run = asyncio.get_running_loop().run_in_executor
        stream = await run(
            self.thread, lambda: Stream(self, self._request_of(prompt, options, "astream", changes))
        )
        with stream:
            while (text := await run(self.thread, next, stream, None)) is not None:
                yield text

    def generate(
        self,
        prompt: Prompt | Request,
        options: GenerationOptions | None = None,
        **changes: Unpack[OptionFields],
    ) -> Answer:
        """Returns the whole answer; accepts a request, or the arguments of `request`."""
        with Stream(self, self._request_of(prompt, options, "generate", changes)) as stream:
            for _ in stream:
                pass
        return stream.answer

    def _request_of(
        self,
        prompt: Prompt | Request,
        options: GenerationOptions | None,
        method: str,
        changes: Mapping[str, Any],
    ) -> Request:
        """Returns a given request, or the request of a prompt; raises UsageError if a request comes with options."""
        if not isinstance(prompt, Request):
            return self.request(prompt, _with(options, method, changes))
        if options is not None or changes:
            names = ", ".join(f"@{name}" for name in changes or ("options",))
            fault = f"{names} would have no effect on a Request, which has its own"
            raise UsageError(fault, "give them to Medusa.request")
        return prompt

    def batch(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions | None = None,
        *,
        batch_size: int = 8,
        **changes: Unpack[OptionFields],
    ) -> list[Answer]:
        """Returns the answers to many prompts, decoded batch_size at a time; prompt i uses random stream i."""
        options = _with(options, "batch", changes)
        if batch_size < 1:
            raise UsageError(f"@batch_size {batch_size} is too small", "use 1 or more")
        requests = [self.request(prompt, options) for prompt in prompts]
        answers = [
            Answer(self.backbone, request.stop_strings, len(request.prompt)) for request in requests
        ]
        with self.lock:
            decoder = self.decoder(max(1, min(batch_size, len(requests))))
            for sequence, step in decoder.run(requests):
                answer = answers[sequence.number]
                answer.add(step, sequence.finish_reason)
                # A stop string may end the answer before its sequence ends.
                if answer.finish_reason:
                    sequence.cancel()
        return answers

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Returns the token ids of any prompt that `request` accepts; raises UsageError for other types."""
        if isinstance(prompt, str):
            if not raw and getattr(self.backbone.tokenizer, "chat_template", None):
                return self.backbone.encode_chat([{"role": "user", "content": prompt}])
            return token_ids(self.backbone, prompt, begin=True)
        items: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(items, Sequence):
            if len(items) == 1 and isinstance(items[0], list):
                [items] = items  # a tokenizer's array has one row per text
            if items and all(isinstance(message, Mapping) for message in items):
                return self.backbone.encode_chat([_message(message) for message in items])
            numbers = [isinstance(id, Integral) and not isinstance(id, bool) for id in items]
            if all(numbers) and all(0 <= id < self.backbone.vocab_size for id in items):
                return [int(id) for id in items]
        last = self.backbone.vocab_size - 1
        remedy = (
            f"give a text, messages, or token ids from 0 to {last}, and several prompts to `batch`"
        )
        raise UsageError("the prompt has an invalid type", remedy)

    def decoder(self, slots: int = 1) -> Decoder:
        """Returns a new decoder for `slots` sequences."""
        loaded = self.loaded
        policy = loaded.policy and loaded.policy.fork()
        return Decoder(loaded.backbone, loaded.drafter, policy, slots=slots, store=self.store)

    def keep_prefixes(self, folder: Path, limit: int) -> None:
        """Keeps cached prefixes in a folder of up to `limit` bytes, from which later processes read them.

        A prefix is written when its slot is needed for another text, while a server decodes, and by `close`. Raises
        UsageError for a folder that cannot be written, and for an engine whose rows depend on other rows.
        """
        self.store = PrefixStore(folder, limit, self.backbone)

    def take_back(self, decoder: Decoder) -> None:
        """Keeps a stream's decoder, whose prefix the next stream may reuse; drops older decoders beyond MAX_IDLE."""
        with self.lock:
            self.idle.append(decoder)
            del self.idle[:-MAX_IDLE]


class Stream:
    """Yields an answer's text step by step. Closing or dropping the stream cancels the rest of the answer."""

    def __init__(self, medusa: Medusa, request: Request) -> None:
        self.answer = Answer(medusa.backbone, request.stop_strings, len(request.prompt))
        self._medusa = medusa
        with medusa.lock:
            # The most recently used decoder most likely holds the start of this conversation.
            decoder = medusa.idle.pop() if medusa.idle else medusa.decoder()
            try:
                self._sequence, first = decoder.admit(request)
            except UserError:
                medusa.take_back(decoder)
                raise
        self._decoder: Decoder | None = decoder
        self._first: list[Piece] | None = self.answer.add(first, self._sequence.finish_reason)
        self.reused = self._sequence.reused

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        while (pieces := self.step()) is not None:
            if text := "".join(piece.text for piece in pieces):
                return text
        raise StopIteration

    def step(self) -> list[Piece] | None:
        """Returns the next step's text in pieces that say whether they were drafted; None after the end."""
        if self._first is not None:
            pieces, self._first = self._first, None
            return pieces
        if self._decoder is not None:
            self._decoder.backbone.check_process()
        try:
            with self._medusa.lock:
                # Another thread may have closed the stream.
                if self._decoder is not None and not self.answer.finish_reason:
                    [(_, step)] = self._decoder.step()
                    return self.answer.add(step, self._sequence.finish_reason)
        except BaseException:  # an interrupted step has cancelled the sequence
            self.close()
            raise
        self.close()
        return None

    def close(self) -> None:
        """Ends the answer at its current length, unless it has already ended."""
        if self._decoder is not None and self._decoder.backbone.forked:
            self._decoder = None  # the stream continues in the parent process
            return
        with self._medusa.lock:
            self.answer.cancel()
            decoder, self._decoder = self._decoder, None
            if decoder is not None:
                self._sequence.cancel()
                self._medusa.take_back(decoder)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_decoder", None) is not None:
            self.close()


class Chat:
    """Holds a conversation with a model; drops the oldest turns when the context is full.

    With `options.raw`, each text is continued as it is, without the earlier turns.
    """

    last: Answer

    def __init__(
        self, medusa: Medusa, options: GenerationOptions, system: str | None = None
    ) -> None:
        options.logits_options.check(medusa.backbone)
        self.medusa = medusa
        self.options = options
        self.total = Stats()
        self.clear(system)

    def clear(self, system: str | None = None) -> None:
        """Starts a new conversation; raises UserError if the system prompt fills the context."""
        if system:
            check_system(self.medusa.backbone, system)
        self.system = system
        self.forgotten = 0
        self.messages = [{"role": "system", "content": system}] if system else []

    def resume(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Continues a conversation; raises UsageError if a message is not valid, and UserError as `clear` does."""
        known = [_message(message) for message in messages]
        system = known[0]["content"] if known and known[0]["role"] == "system" else None
        self.clear(system)
        self.messages = known

    @contextmanager
    def stream(self, text: str) -> Iterator[Stream]:
        """Yields the stream that answers a message; adds message and answer to the conversation when the block ends."""
        question = {"role": "user", "content": text}
        backbone = self.medusa.backbone
        if self.options.raw:
            prompt = self.medusa.encode(text, raw=True)
        else:
            prompt, self.forgotten = fit(
                backbone.encode_chat,
                self.messages,
                question,
                context=backbone.max_positions,
                answer=self.options.max_new_tokens,
                forgotten=self.forgotten,
            )
        request = self.options.request(prompt, backbone)
        with self.medusa.stream(request) as stream:
            yield stream
        self.last = stream.answer
        self.messages += [question, {"role": "assistant", "content": self.last.text}]
        self.total += self.last.stats


def _message(message: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        fault = f"{shown(dict(message))} is not a message"
        raise UsageError(fault, 'give {"role": ..., "content": ...}, both texts')
    if message["role"] not in ROLES:
        fault = f"the role {shown(message['role'])} is unknown"
        raise UsageError(fault, f"use one of {', '.join(ROLES)}")
    return dict(message)


def _with(
    options: GenerationOptions | None, method: str, changes: Mapping[str, Any]
) -> GenerationOptions:
    """Returns the options updated with keyword arguments; raises TypeError for unknown names, as Python does."""
    for name in changes:
        if name not in GenerationOptions.__dataclass_fields__:
            raise TypeError(f"Medusa.{method}() got an unexpected keyword argument {name!r}")
    return replace(options or GenerationOptions(), **changes)
