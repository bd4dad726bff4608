"""The ASGI application, with OpenAI's routes and a handler that turns bodies into requests and steps into answers."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from medusa_cli import __version__
from medusa_cli.api import Medusa
from medusa_cli.decode import Answer, Request
from medusa_cli.decode.grammar import Grammar, matcher_of
from medusa_cli.decode.lazy_grammar import LazyGrammar
from medusa_cli.decode.sequence import Sequence
from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.errors import UserError, shown
from medusa_cli.model.chat_template import token_ids
from medusa_cli.serve import llama_cpp, messages, neutral, ollama, responses
from medusa_cli.serve.answer_format import AnswerFormat
from medusa_cli.serve.bodies import BodyRoute
from medusa_cli.serve.calls import end_of_first_call
from medusa_cli.serve.errors import (
    ErrorBody,
    MessagesError,
    Refusal,
    TextError,
    check_whole,
    failure,
    refusal_for,
    refusal_for_body,
    refusal_for_http,
    too_long,
)
from medusa_cli.serve.infill import infill_ends, infill_ids
from medusa_cli.serve.llama_cpp import InfillRequest, LlamaFormat, LlamaRequest, LlamaSampling
from medusa_cli.serve.messages import MessagesFormat, MessagesRequest
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.middleware import Limits, Middleware, Receive
from medusa_cli.serve.ollama import OllamaChat, OllamaFormat, OllamaGenerate, ShowRequest
from medusa_cli.serve.openai_format import OpenAIFormat
from medusa_cli.serve.responses import ResponsesFormat, ResponsesRequest
from medusa_cli.serve.scheduler import WAITING, Event, Scheduler, Ticket
from medusa_cli.serve.schema import (
    MAX_BIASES,
    MAX_GRAMMAR,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    Sampling,
    TokenizeChat,
    TokenizeRequest,
    TokenizeText,
)
from medusa_cli.serve.templates import TemplateProcess
from medusa_cli.serve.tools import (
    calls_grammar,
    describe_tools,
    free_calls,
    marker_ids,
    note_once,
    template_of,
)

Body = ChatRequest | CompletionRequest | TokenizeText | TokenizeChat | DetokenizeRequest
Translation = TypeVar(
    "Translation", ChatRequest, CompletionRequest, ChatRequest | CompletionRequest
)
# Returns the format of an answer, given its ticket.
Shape = Callable[[Ticket], AnswerFormat]
PAGE = Path(__file__).with_name("index.html")
# The page may only run its own script and connect to this server.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)
# Origins of pages that this machine serves; other model servers allow them, too.
LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
# Grammars with more characters are compiled a few at a time.
SMALL_GRAMMAR = 16_384
# Keeps only the likeliest token, as a top_p of 0 does in OpenAI's API.
MIN_TOP_P = 1e-9
# Seconds without an event after which a stream sends something else, before clients give up.
KEEP_ALIVE_S = 5.0
# The length of an answer for which each request without a limit has room, if the context has.
MIN_ANSWER = 2048
log = logging.getLogger(__name__)
STATUSES = (400, 401, 403, 404, 408, 413, 429, 500, 503)


def refusals(body: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the responses that refuse a request, for the schema."""
    return {status: {"model": body} for status in statuses or STATUSES}


def answers(body: type[BaseModel], media: str) -> dict[int | str, dict[str, Any]]:
    """Returns the responses to a request for an answer, which may come as a stream, for the schema."""
    return {**refusals(body), 200: {"content": {media: {}}}}


REFUSALS = refusals(ErrorBody)
ANSWERS = answers(ErrorBody, "text/event-stream")
MESSAGES = answers(MessagesError, "text/event-stream")
LINES = answers(TextError, "application/x-ndjson")


@contextmanager
def renamed(fields: Mapping[str, str]) -> Iterator[None]:
    """Gives the refusals of chats and completions the names of fields in another API."""
    try:
        yield
    except Refusal as refusal:
        raise refusal.renamed(fields) from refusal


async def translated(body: BaseModel, translate: Callable[[], Translation]) -> Translation:
    """Returns the chat or completion that a request to another API expresses; raises Refusal."""
    await run_in_threadpool(check_whole, body)
    try:
        return await run_in_threadpool(translate)
    except ValidationError as reason:
        raise refusal_for_body(reason.errors()) from reason


def build(medusa: Medusa, limits: Limits, templates: TemplateProcess) -> tuple[Any, Scheduler]:
    """Returns the ASGI application, and the scheduler that the caller runs and drains."""
    metrics = Metrics(limits.names[0])
    scheduler = Scheduler(medusa, metrics, slots=limits.slots, waiting=limits.waiting)
    app = FastAPI(title="medusa serve", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    handler = Handler(medusa, scheduler, limits, templates)
    started = int(time.time())

    def model(name: str) -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": started, "owned_by": "medusa"}
        meta = {"n_ctx_train": medusa.backbone.max_positions, "n_vocab": medusa.backbone.vocab_size}
        return {**own, "root": name, "parent": None, "max_model_len": handler.context, "meta": meta}

    @app.post("/chat/completions", include_in_schema=False)
    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat(body: ChatRequest, http: HttpRequest) -> Any:
        return await handler.answer(body, http.receive)

    @app.post("/completions", include_in_schema=False)
    @app.post("/v1/completions", responses=ANSWERS)
    async def complete(body: CompletionRequest, http: HttpRequest) -> Any:
        return await handler.answer(body, http.receive)

    @app.post("/responses", include_in_schema=False)
    @app.post("/v1/responses", responses=ANSWERS)
    async def respond(body: ResponsesRequest, http: HttpRequest) -> Any:
        with renamed(responses.FIELDS):
            chat = await translated(body, body.chat)
            if body.truncation == "auto":
                await handler.truncate(chat)
            return await handler.answer(chat, http.receive, partial(ResponsesFormat, body, chat))

    @app.post("/messages", include_in_schema=False)
    @app.post("/v1/messages", responses=MESSAGES)
    async def message(body: MessagesRequest, http: HttpRequest) -> Any:
        with renamed(messages.FIELDS):
            chat = await translated(body, body.chat)
            shape = partial(MessagesFormat, medusa.backbone, chat)
            return await handler.answer(chat, http.receive, shape)

    @app.post("/messages/count_tokens", include_in_schema=False)
    @app.post("/v1/messages/count_tokens", responses=refusals(MessagesError))
    async def count_tokens(body: MessagesRequest) -> dict[str, int]:
        with renamed(messages.FIELDS):
            chat = await translated(body, body.chat)
            return {"input_tokens": await handler.count(chat)}

    @app.post("/completion", responses=ANSWERS)
    async def continued(body: LlamaRequest, http: HttpRequest) -> Any:
        with renamed(llama_cpp.FIELDS):
            return await handler.continued(body, body.prompt, http.receive)

    @app.post("/infill", responses=ANSWERS)
    async def infill(body: InfillRequest, http: HttpRequest) -> Any:
        with renamed(llama_cpp.FIELDS):
            return await handler.infill(body, http.receive)

    @app.post("/api/chat", responses=LINES)
    async def ollama_chat(body: OllamaChat, http: HttpRequest) -> Any:
        return await ollama_answer(body, http)

    @app.post("/api/generate", responses=LINES)
    async def ollama_generate(body: OllamaGenerate, http: HttpRequest) -> Any:
        return await ollama_answer(body, http)

    async def ollama_answer(body: OllamaChat | OllamaGenerate, http: HttpRequest) -> Any:
        with renamed(ollama.FIELDS):
            if body.is_empty:
                return ollama.loaded(body, limits.names[0])
            given = await translated(body, body.translated)
            shape = partial(OllamaFormat, given, isinstance(body, OllamaChat))
            return await handler.answer(given, http.receive, shape)

    @app.get("/api/tags", responses=refusals(TextError, 401))
    async def tags() -> dict[str, Any]:
        return ollama.listed(medusa.backbone, limits.names, started)

    @app.post("/api/show", responses=refusals(TextError))
    async def show(body: ShowRequest) -> dict[str, Any]:
        if name := body.model or body.name:
            handler.check_model(name.removesuffix(":latest"))
        return ollama.described(medusa.backbone, handler.context, started)

    @app.get("/api/version", responses=refusals(TextError, 401))
    async def api_version() -> dict[str, str]:
        return {"version": ollama.VERSION}

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in limits.names]}

    @app.get("/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def retrieve(name: str) -> dict[str, Any]:
        if not name:
            raise HTTPException(404)
        handler.check_model(name)
        return model(name)

    @app.post("/tokenize", responses=REFUSALS)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await handler.tokenize(body)

    @app.post("/detokenize", responses=REFUSALS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        return await handler.detokenize(body)

    @app.post("/apply-template", responses=REFUSALS)
    async def apply_template(body: ChatRequest) -> dict[str, str]:
        if body.model is not None:
            handler.check_model(body.model)
        await run_in_threadpool(check_whole, body)
        return {"prompt": await handler.render(body)}

    @app.get("/props", responses={401: REFUSALS[401]})
    async def props() -> dict[str, Any]:
        return handler.props()

    @app.get("/slots", responses={401: REFUSALS[401]})
    async def slots() -> list[dict[str, Any]]:
        return handler.slots()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health", responses={503: {}})
    async def health() -> JSONResponse:
        well = scheduler.alive and not scheduler.closing
        return JSONResponse({"status": "ok" if well else "closing"}, 200 if well else 503)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def numbers() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(
            PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": POLICY}
        )

    @app.exception_handler(Refusal)
    async def refused(http: HttpRequest, reason: Refusal) -> Response:
        return reason.response(http.url.path)

    @app.exception_handler(MemoryError)
    async def out_of_memory(http: HttpRequest, reason: MemoryError) -> Response:
        return failure(reason).response(http.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, reason: RequestValidationError) -> Response:
        return refusal_for_body(reason.errors()).response(http.url.path)

    @app.exception_handler(HTTPException)
    async def unknown(http: HttpRequest, reason: HTTPException) -> Response:
        response = refusal_for_http(http.url.path, reason).response(http.url.path)
        response.headers.update(reason.headers or {})
        return response

    # CORS comes before the check of the key, because browsers send preflight requests without it.
    allowed: Any = {"allow_origins": limits.cors, "allow_origin_regex": LOCAL_PAGES}
    any_method: Any = {"allow_methods": ["*"], "allow_headers": ["*"]}
    any_method["expose_headers"] = ["x-request-id", neutral.HEADER]
    return CORSMiddleware(Middleware(app, limits, metrics), **allowed, **any_method), scheduler


class LargeResponse(JSONResponse):
    """A JSON response that may be large; it is written piece by piece, so that other threads go on meanwhile."""

    def render(self, content: Any) -> bytes:
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return "".join(encoder.iterencode(content)).encode()


class Handler:
    """Submits completion requests to the scheduler and formats their answers."""

    def __init__(
        self, medusa: Medusa, scheduler: Scheduler, limits: Limits, templates: TemplateProcess
    ) -> None:
        self._medusa = medusa
        self._scheduler = scheduler
        self._limits = limits
        self._templates = templates
        self._noted_context = False
        self._rendering = asyncio.Lock()  # a slow chat template holds up only other chats
        self._encoding = asyncio.Lock()  # two threads must not share a tokenizer
        # Threads that compute in Python hold up one another, and those that answer and decode.
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
        """Logs once that a prompt was too long, if an option would admit it."""
        longest = self._medusa.backbone.max_positions
        if self.context < longest and not self._noted_context:
            self._noted_context = True
            log.warning(
                "refused a prompt of %s tokens: the context is %s; --context raises it as far as the memory allows, "
                "up to the model's %s",
                *(f"{number:,}" for number in (tokens, self.context, longest)),
            )

    def props(self) -> dict[str, Any]:
        """Returns the properties that llama.cpp's clients read."""
        limits = self._limits
        tokenizer = self._medusa.backbone.tokenizer
        params = {
            "temperature": limits.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "n_predict": -1 if limits.max_new_tokens is None else limits.max_new_tokens,
        }
        return {
            "default_generation_settings": {"n_ctx": self.context, "params": params},
            "total_slots": limits.slots,
            "model_alias": limits.names[0],
            "model_path": limits.names[0],
            "modalities": {"vision": False, "audio": False},
            "chat_template": template_of(self._medusa.backbone),
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
            "build_info": f"medusa {__version__}",
        }

    def slots(self) -> list[dict[str, Any]]:
        """Returns each slot's state in llama.cpp's format, without any text."""
        running = self._scheduler.running()
        idle: dict[str, Any] = {"n_ctx": self.context, "speculative": self._scheduler.speculative}
        slots = [
            {"id": number, **idle, "is_processing": False} for number in range(self._limits.slots)
        ]
        for slot, ticket in zip(slots, running, strict=False):
            left = ticket.request.max_new_tokens - ticket.answer.stats.tokens
            slot["is_processing"] = True
            slot["n_prompt_tokens"] = len(ticket.request.prompt)
            slot["next_token"] = {"n_decoded": ticket.answer.stats.tokens, "n_remain": left}
        return slots

    def check_model(self, name: str) -> None:
        names = self._limits.names
        if name not in names:
            text = f"the model {shown(name)} is not served here; ask for {names[0]!r}"
            raise Refusal(404, text, param="model", code="model_not_found")

    async def answer(
        self,
        body: ChatRequest | CompletionRequest,
        receive: Receive,
        shape: Shape | None = None,
    ) -> Response:
        """Returns the whole answer, or a stream of it, in the requested format; raises Refusal.

        shape: returns the format, None for OpenAI's of chats and completions.
        """
        await run_in_threadpool(check_whole, body)
        body.model = body.model or self._limits.names[0]
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(index: int, event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        tickets = await self._tickets(body, deliver)
        answer: OpenAIFormat | AnswerFormat
        if shape is None:
            answer = await run_in_threadpool(OpenAIFormat, self._medusa.backbone, body, tickets)
        else:
            answer = shape(tickets[0])

        for ticket in tickets:
            ticket.reports = body.stream and body.return_progress
        self._scheduler.submit(tickets)
        received = _until_gone(tickets, events, receive)
        if body.stream:
            lines = answer.stream(received)
            # The second one keeps nginx from collecting the text.
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(lines, media_type=answer.media, headers=headers)
        async with aclosing(received):
            async for _, event in received:
                if event.error is not None:
                    raise failure(event.error)
                if isinstance(answer, ResponsesFormat):
                    answer.read(event)
        return await run_in_threadpool(lambda: LargeResponse(answer.whole()))

    async def continued(
        self, body: LlamaSampling, prompt: str | list[int], receive: Receive
    ) -> Response:
        """Returns the answer to a prompt as llama.cpp does; raises Refusal."""
        completion = await translated(body, partial(body.completion, prompt))
        name = completion.model or self._limits.names[0]
        return await self.answer(
            completion, receive, partial(LlamaFormat, self._medusa.backbone, body, name)
        )

    async def infill(self, body: InfillRequest, receive: Receive) -> Response:
        """Returns the text between two others as llama.cpp does; raises Refusal."""
        await run_in_threadpool(check_whole, body)
        backbone = self._medusa.backbone
        room = body.room(self.context)
        encode = partial(infill_ids, backbone, body.prefix, body.input_suffix, body.files, room)
        try:
            async with self._encoding:
                prompt = await run_in_threadpool(encode)
        except UserError as reason:
            raise self._refusal(reason, "input_prefix") from reason
        body.stop_token_ids = [*body.stop_token_ids, *infill_ends(backbone)]
        return await self.continued(body, prompt, receive)

    async def count(self, chat: ChatRequest) -> int:
        """Returns the number of tokens of a chat's prompt; raises Refusal."""
        [tokens] = await self._encode(chat)
        return len(tokens)

    async def truncate(self, chat: ChatRequest) -> None:
        """Drops the oldest messages, but for system messages, until the rest fits in the context; raises Refusal.

        A turn begins with a message of the user, and is dropped as a whole. The last one always stays.
        """
        messages = chat.messages
        first = next((i for i, one in enumerate(messages) if not one.is_system), 0)
        starts = [i for i, one in enumerate(messages) if i > first and one.role == "user"]
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            chat.messages = [*messages[:first], *messages[([first, *starts])[middle] :]]
            [tokens] = await self._encode(chat)
            if len(tokens) < self.context:
                high = middle
            else:
                low = middle + 1
        chat.messages = [*messages[:first], *messages[([first, *starts])[low] :]]

    async def tokenize(self, body: TokenizeText | TokenizeChat) -> dict[str, Any]:
        """Returns the token ids of a text or a conversation, as vLLM and llama.cpp name them; raises Refusal."""
        await run_in_threadpool(check_whole, body)
        [tokens] = await self._encode(body)
        tokenizer = self._medusa.backbone.tokenizer
        if isinstance(body, TokenizeText) and body.with_pieces:
            pieces = await run_in_threadpool(lambda: [tokenizer.decode([id]) for id in tokens])
            named = zip(tokens, pieces, strict=True)
            return {"tokens": [{"id": id, "piece": piece} for id, piece in named]}
        texts = None
        if body.return_token_strs:
            texts = await run_in_threadpool(tokenizer.convert_ids_to_tokens, tokens)
        return {
            "count": len(tokens),
            "max_model_len": self.context,
            "tokens": tokens,
            "token_strs": texts,
        }

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """Returns the text of token ids, special tokens included, as vLLM and llama.cpp name it; raises Refusal."""
        [tokens] = await self._encode(body)
        text = await run_in_threadpool(self._medusa.backbone.tokenizer.decode, tokens)
        return {"prompt": text, "content": text}

    async def _tickets(
        self, body: ChatRequest | CompletionRequest, deliver: Callable[[int, Event], None]
    ) -> list[Ticket]:
        """Returns a ticket per choice, within the server's limits; raises Refusal.

        What may take long is done in threads: neither the other clients nor the decoder wait for it.
        """
        prompts = await self._encode(body)
        if body.truncate_prompt_tokens is not None:
            kept = (
                self.context - 1 if body.truncate_prompt_tokens < 0 else body.truncate_prompt_tokens
            )
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
            names = [tool["function"]["name"] for tool in body.offered]
            rules["end_of"] = partial(end_of_first_call, names=names)
        stops = StopStrings(backbone, body.stop_strings)
        tickets = list[Ticket]()
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
                    tickets.append(Ticket(own, answer, receiver, sequence.fork(own)))
        except UserError as reason:
            raise self._refusal(reason, "prompt") from reason
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
        """Returns the bias by token id; the bias of a text is that of each of its tokens. Raises Refusal."""
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
            raise self._refusal(reason, field) from reason

    def _stop_ids(self, body: ChatRequest | CompletionRequest) -> set[int] | None:
        """Returns the token ids that end an answer, or None for only the model's own; raises Refusal."""
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

        The grammar is compiled here, so that it need not be compiled between the steps of other
        answers; of the large ones, a few at a time.
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
            raise self._refusal(reason, body.constraint) from reason

    def _free_calls(self, tools: list[dict[str, Any]]) -> LazyGrammar | None:
        """Returns the grammar of an answer that may call tools; None if this model cannot follow one."""
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

    async def _encode(self, body: Body) -> list[list[int]]:
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
            field = next(
                field
                for field in ("messages", "prompt", "content", "tokens")
                if field in body.model_fields_set
            )
            raise self._refusal(reason, field) from reason

    async def render(self, body: Conversation) -> str:
        """Returns a conversation as the text of a prompt; raises Refusal."""
        try:
            async with self._rendering:
                return await run_in_threadpool(self._render, body)
        except UserError as reason:
            raise self._refusal(reason, "messages") from reason

    def _render(self, body: Conversation) -> str:
        """Returns a conversation as the text of a prompt."""
        template = template_of(self._medusa.backbone)
        neutral.note(
            name
            for name in ("enable_thinking", "reasoning_effort")
            if name in body.template
            and name not in {*body.chat_template_kwargs}
            and name not in template
        )
        own = signature(self._medusa.backbone.tokenizer.apply_chat_template).parameters
        for name in body.chat_template_kwargs:
            if name in own:
                param = f"chat_template_kwargs.{name}"
                raise Refusal(
                    400,
                    f"{param} is not a variable of a chat template",
                    param=param,
                    code="unsupported",
                )
        plain = [message.plain for message in body.messages]
        messages, more = describe_tools(self._medusa.backbone, plain, body.offered)
        return self._templates.render(messages, {**body.template, **more})

    def _token_ids(
        self, body: CompletionRequest | TokenizeText | DetokenizeRequest
    ) -> list[list[int]]:
        """Returns the token ids of prompts."""
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

    def _refusal(self, reason: UserError, param: str) -> Refusal:
        """Returns the refusal for a UserError, without the model's path on this machine, which clients must not see."""
        refusal = refusal_for(reason, param)
        text = str(refusal).replace(self._medusa.backbone.id, self._limits.names[0])
        return Refusal(refusal.status, text, param=refusal.param, code=refusal.code)


async def _until_gone(
    tickets: list[Ticket], events: asyncio.Queue[tuple[int, Event]], receive: Receive
) -> AsyncGenerator[tuple[int, Event]]:
    """Yields the events of all choices, and WAITING while none comes.

    If the client disconnects or stops reading, its slots are freed.
    """

    def abandon() -> None:
        for ticket in tickets:
            ticket.abandoned = True

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        abandon()

    watcher = asyncio.create_task(watch())
    unfinished = len(tickets)
    try:
        while unfinished:
            index, event = 0, WAITING
            with suppress(TimeoutError):
                index, event = await asyncio.wait_for(events.get(), KEEP_ALIVE_S)
            if tickets[0].abandoned:
                return
            yield index, event
            unfinished -= event.last
    finally:
        watcher.cancel()
        abandon()
