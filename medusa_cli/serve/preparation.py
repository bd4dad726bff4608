"""Turns the bodies of requests into tickets: renders and encodes prompts, compiles grammars, checks limits."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, cast

from starlette.concurrency import run_in_threadpool

from medusa_cli.api import Medusa
from medusa_cli.decode import Answer, Request
from medusa_cli.decode.grammar import Grammar, matcher_of
from medusa_cli.decode.lazy_grammar import LazyGrammar
from medusa_cli.decode.sequence import Sequence
from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.errors import UserError, shown
from medusa_cli.model.chat_template import token_ids
from medusa_cli.serve import neutral
from medusa_cli.serve.answer_fields import MAX_BIASES, MAX_GRAMMAR, Sampling
from medusa_cli.serve.calls import end_of_first_call
from medusa_cli.serve.chats import ChatRequest, Conversation
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.infill import infill_ids
from medusa_cli.serve.llama_cpp import InfillRequest
from medusa_cli.serve.middleware import Limits
from medusa_cli.serve.record import allowed, kind_of
from medusa_cli.serve.refusals import Refusal, refusal_for, too_long
from medusa_cli.serve.scheduler import Event, Scheduler, Ticket
from medusa_cli.serve.templates import TemplateProcess
from medusa_cli.serve.tokens import DetokenizeRequest, TokenizeChat, TokenizeText
from medusa_cli.serve.tools import (
    calls_grammar,
    describe_tools,
    free_calls,
    marker_ids,
    note_once,
    template_of,
)

Body = ChatRequest | CompletionRequest | TokenizeText | TokenizeChat | DetokenizeRequest
# At most two grammars with more characters than this are compiled at a time.
SMALL_GRAMMAR = 16_384
# Keeps only the likeliest token, as a top_p of 0 does in OpenAI's API.
MIN_TOP_P = 1e-9
# The answer to a request without a limit may always have this many tokens, if they fit in the context.
MIN_ANSWER = 2048
log = logging.getLogger(__name__)


class Preparation:
    """Turns the bodies of requests into tickets for the scheduler, within the server's limits.

    Long work is done in threads, so that neither other clients nor the decoder wait for it.
    """

    def __init__(
        self, medusa: Medusa, scheduler: Scheduler, limits: Limits, templates: TemplateProcess
    ) -> None:
        self._medusa = medusa
        self._scheduler = scheduler
        self._limits = limits
        self._templates = templates
        self._noted_context = False
        self._rendering = asyncio.Lock()  # a slow chat template delays only other chats
        self._encoding = asyncio.Lock()  # two threads must not share a tokenizer
        # Only one thread prepares tickets: threads that compute in Python delay each other and the decoder.
        self._preparing = asyncio.Lock()
        self._compiling = asyncio.Semaphore(2)

    @property
    def context(self) -> int:
        """Returns the maximum number of tokens of a prompt and its answer together."""
        longest = self._medusa.backbone.max_positions
        return min(longest, self._limits.context or longest)

    def _longest_answer(self, body: ChatRequest | CompletionRequest, prompt: list[int]) -> int:
        """Returns the maximum length of an answer to a prompt; raises Refusal for a prompt that is too long."""
        limits = self._limits
        left = self.context - len(prompt)
        if left < 1:
            self._note_context(len(prompt))
            raise too_long(len(prompt), self.context)
        if body.limit is not None:
            left = min(left, body.limit)
        elif limits.share is not None:
            left = min(left, max(limits.share - len(prompt), MIN_ANSWER))
        return left if limits.max_new_tokens is None else min(left, limits.max_new_tokens)

    def _note_context(self, tokens: int) -> None:
        """Logs once that a prompt was too long, if the context could be larger."""
        longest = self._medusa.backbone.max_positions
        if self.context < longest and not self._noted_context:
            self._noted_context = True
            log.warning(
                "refused a prompt of %s tokens: the context is %s; --context raises it as far as the memory allows, "
                "up to the model's %s",
                *(f"{number:,}" for number in (tokens, self.context, longest)),
            )

    def check_model(self, name: str) -> None:
        names = self._limits.names
        if name not in names:
            text = f"the model {shown(name)} is not served here; ask for {names[0]!r}"
            raise Refusal(404, text, param="model", code="model_not_found")

    async def tickets(
        self, body: ChatRequest | CompletionRequest, deliver: Callable[[int, Event], None]
    ) -> list[Ticket]:
        """Returns a ticket per choice, within the server's limits; raises Refusal."""
        prompts = await self.encode(body)
        if (kept := body.truncate_prompt_tokens) is not None:
            kept = self.context - 1 if kept < 0 else kept
            prompts = [prompt[-kept:] for prompt in prompts]
        answers = [self._longest_answer(body, prompt) for prompt in prompts]
        self._scheduler.check_number(len(prompts) * body.n)
        grammar = await self._grammar(body)
        body.logit_bias = await self._logit_bias(body)
        async with self._preparing:
            return await run_in_threadpool(self._prepare, body, prompts, answers, grammar, deliver)

    def _prepare(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        answers: list[int],
        grammar: Grammar | LazyGrammar | None,
        deliver: Callable[[int, Event], None],
    ) -> list[Ticket]:
        """Returns a ticket per choice; raises Refusal."""
        backbone = self._medusa.backbone
        # Special tokens that are kept in the answer's text.
        keep = frozenset() if body.skip_special_tokens else backbone.special_ids
        if isinstance(body, ChatRequest) and body.offered:
            keep = keep.union(marker_ids(backbone).values())
        rules: Any = {"keep": keep, "include_stop": body.include_stop_str_in_output}
        if isinstance(body, ChatRequest) and body.offered and body.parallel_tool_calls is False:
            rules["end_of"] = partial(end_of_first_call, names=body.offered_names)
        stops = StopStrings(backbone, body.stop_strings)
        tickets = list[Ticket]()
        kind = kind_of(body, grammar)
        recorder = self._scheduler.recorder if body.record and allowed.get() else None
        try:
            for prompt, limit in zip(prompts, answers, strict=True):
                request = self._request(body, prompt, limit, grammar)
                sequence = Sequence(backbone, request)
                if sequence.sampler.processors is not None:
                    sequence.sampler.processors.warm_up(backbone.vocab_size)
                for _ in range(body.n):
                    seed = secrets.randbits(62)
                    if body.seed is not None:
                        seed = body.seed + len(tickets)
                    own = replace(request, sampling=replace(request.sampling, seed=seed))
                    answer = Answer(backbone, stops, ends=sequence.stop.stop_ids, **rules)
                    receiver = partial(deliver, len(tickets))
                    ticket = Ticket(own, answer, receiver, sequence.fork(own), kind=kind)
                    if recorder is not None:
                        ticket.keep = partial(recorder.keep, body, prompt, kind, answer)
                    tickets.append(ticket)
        except UserError as reason:
            raise self.refusal(reason, "prompt") from reason
        return tickets

    def _request(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: list[int],
        limit: int,
        grammar: Grammar | LazyGrammar | None,
    ) -> Request:
        """Returns the request for a prompt, with an answer of up to `limit` tokens; raises UserError and Refusal."""
        scored = body.prompt_logprobs is not None or (
            isinstance(body, CompletionRequest) and body.echo
        )
        wanted = [count for count in (body.top, body.prompt_logprobs) if count is not None]
        temperature = body.chosen_temperature
        if temperature is None:
            temperature = self._limits.temperature

        minimum = body.min_tokens
        if minimum is not None and body.limit is not None and minimum <= body.limit:
            # The server's limit may be lower than the client's.
            minimum = min(minimum, limit)
        return self._medusa.request(
            prompt,
            max_new_tokens=limit,
            temperature=temperature,
            top_p=1.0 if body.top_p is None else max(body.top_p, MIN_TOP_P),
            top_k=body.top_k or 0,
            min_p=body.min_p,
            stop=body.stop_strings,
            stop_ids=self._stop_ids(body),
            logprobs=max(wanted, default=None),
            prompt_logprobs=scored,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty or None,
            frequency_penalty=body.frequency_penalty or None,
            no_repeat_ngram_size=body.no_repeat_ngram_size,
            min_new_tokens=minimum,
            logit_bias=cast("dict[int, float] | None", body.logit_bias),
            grammar=grammar,
            speculative=body.drafts.enabled,
            raw=True,
        )

    async def _logit_bias(self, body: Sampling) -> dict[int | str, float] | None:
        """Returns the bias by token id; the bias of a text applies to each of its tokens. Raises Refusal."""
        if not body.logit_bias:
            return None
        biases = dict[int | str, float]()
        for key, bias in body.logit_bias.items():
            tokens = [key] if isinstance(key, int) else await self._encoded(key, "logit_bias")
            biases.update(dict.fromkeys(tokens, bias))
        if len(biases) > MAX_BIASES:
            text = f"logit_bias is that of {len(biases):,} tokens; use at most {MAX_BIASES:,}"
            raise Refusal(400, text, param="logit_bias", code="invalid_value")
        return biases

    async def _encoded(self, text: str, field: str) -> list[int]:
        """Returns the token ids of a text; raises Refusal."""
        try:
            async with self._encoding:
                return await run_in_threadpool(token_ids, self._medusa.backbone, text)
        except UserError as reason:
            raise self.refusal(reason, field) from reason

    def _stop_ids(self, body: ChatRequest | CompletionRequest) -> set[int] | None:
        """Returns the token ids that end an answer, or None if only the model's own do; raises Refusal."""
        backbone = self._medusa.backbone
        for token in body.stop_token_ids:
            if token >= backbone.vocab_size:
                text = f"stop_token_ids: {token} is not a token id; use ids from 0 to {backbone.vocab_size - 1}"
                raise Refusal(400, text, param="stop_token_ids", code="invalid_value")
        if body.ignore_eos:
            return {*body.stop_token_ids}
        return {*body.stop_token_ids, *backbone.eos_ids} if body.stop_token_ids else None

    async def _grammar(self, body: ChatRequest | CompletionRequest) -> Grammar | LazyGrammar | None:
        """Returns the answer's grammar, if any; raises Refusal.

        The grammar is compiled here, so that no answer waits for it between two steps. At most two large
        grammars are compiled at a time.
        """
        try:
            grammar = await run_in_threadpool(self._uncompiled, body)
            if grammar is None and isinstance(body, ChatRequest) and body.offered:
                return await run_in_threadpool(self._free_calls, body.offered)
            if grammar is None:
                return None
            length = len(grammar.text)
            if length > MAX_GRAMMAR:
                text = f"{body.constraint} has {length:,} characters; use at most {MAX_GRAMMAR:,}"
                raise Refusal(400, text, param=body.constraint, code="invalid_value")
            async with self._compiling if length > SMALL_GRAMMAR else nullcontext():
                await run_in_threadpool(matcher_of, self._medusa.backbone, grammar)
            return grammar
        except UserError as reason:
            raise self.refusal(reason, body.constraint) from reason

    def _free_calls(self, tools: list[dict[str, Any]]) -> LazyGrammar | None:
        """Returns the grammar of an answer that may call tools; None if this model cannot follow the grammar."""
        try:
            grammar = free_calls(self._medusa.backbone, tools)
            grammar.check(self._medusa.backbone)
            return grammar
        except UserError as reason:
            note_once(f"calls of tools are free: {reason.message}")
            return None

    def _uncompiled(self, body: ChatRequest | CompletionRequest) -> Grammar | None:
        """Returns the answer's grammar, if any; raises UserError."""
        backbone = self._medusa.backbone
        grammar = body.followed
        if isinstance(body, ChatRequest) and body.required:
            return calls_grammar(backbone, body.required, bool(body.parallel_tool_calls))
        is_schema = grammar is not None and grammar.kind == "json_schema"
        if isinstance(body, ChatRequest) and body.offered and is_schema:
            return calls_grammar(backbone, body.offered, bool(body.parallel_tool_calls), grammar)
        return grammar

    async def encode(self, body: Body) -> list[list[int]]:
        """Returns the token ids of a request's prompts; raises Refusal."""
        if body.model is not None:
            self.check_model(body.model)
        try:
            if isinstance(body, Conversation):
                text = await self.render(body)
                encode = partial(token_ids, self._medusa.backbone, begin=body.add_special_tokens)
                async with self._encoding:
                    return [await run_in_threadpool(encode, text)]
            async with self._encoding:
                return await run_in_threadpool(self._token_ids, body)
        except UserError as reason:
            fields = ("messages", "prompt", "content", "tokens")
            given = [field for field in fields if field in body.model_fields_set]
            raise self.refusal(reason, given[0]) from reason

    async def infill(self, body: InfillRequest) -> list[int]:
        """Returns the prompt for the text between a prefix and a suffix; raises Refusal."""
        backbone = self._medusa.backbone
        room = body.room(self.context)
        encode = partial(infill_ids, backbone, body.prefix, body.input_suffix, body.files, room)
        try:
            async with self._encoding:
                return await run_in_threadpool(encode)
        except UserError as reason:
            raise self.refusal(reason, "input_prefix") from reason

    async def render(self, body: Conversation) -> str:
        """Returns a conversation as the text of a prompt; raises Refusal."""
        try:
            async with self._rendering:
                return await run_in_threadpool(self._render, body)
        except UserError as reason:
            raise self.refusal(reason, "messages") from reason

    def _render(self, body: Conversation) -> str:
        """Returns a conversation as the text of a prompt."""
        template = template_of(self._medusa.backbone)
        asked = {"enable_thinking", "reasoning_effort"} & {*body.template}
        neutral.note(
            name for name in sorted(asked - {*body.chat_template_kwargs}) if name not in template
        )
        own = signature(self._medusa.backbone.tokenizer.apply_chat_template).parameters
        for name in body.chat_template_kwargs:
            if name in own:
                param = f"chat_template_kwargs.{name}"
                text = f"{param} is not a variable of a chat template"
                raise Refusal(400, text, param=param, code="unsupported")
        plain = [message.plain for message in body.messages]
        messages, more = describe_tools(self._medusa.backbone, plain, body.offered)
        return self._templates.render(messages, {**body.template, **more})

    def _token_ids(
        self, body: CompletionRequest | TokenizeText | DetokenizeRequest
    ) -> list[list[int]]:
        """Returns the token ids of each prompt of a request."""
        if isinstance(body, TokenizeText):
            return [token_ids(self._medusa.backbone, body.text, begin=body.begins)]
        backbone = self._medusa.backbone
        if isinstance(body, CompletionRequest) and body.suffix:
            return [infill_ids(backbone, str(prompt), body.suffix) for prompt in body.prompts]
        begin = not isinstance(body, CompletionRequest) or body.add_special_tokens

        def encode(prompt: Any) -> list[int]:
            if isinstance(prompt, str):
                return token_ids(backbone, prompt, begin=begin)
            return self._medusa.encode(prompt)

        return [encode(prompt) for prompt in body.prompts]

    def refusal(self, reason: UserError, param: str) -> Refusal:
        """Returns the refusal for a UserError, without the model's path on this machine, which clients must not see."""
        refusal = refusal_for(reason, param)
        text = str(refusal).replace(self._medusa.backbone.id, self._limits.names[0])
        return Refusal(refusal.status, text, param=refusal.param, code=refusal.code)
