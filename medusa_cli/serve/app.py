"""The ASGI application: OpenAI's routes, and the handler that turns bodies into requests and steps into answers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from medusa_cli import __version__
from medusa_cli.api import Medusa
from medusa_cli.decode import Request
from medusa_cli.errors import UserError, shown
from medusa_cli.serve.errors import ErrorBody, Refusal, refusal_for, refusal_for_body, refusal_for_http
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.middleware import Limits, Middleware, Receive
from medusa_cli.serve.openai_format import OpenAIFormat
from medusa_cli.serve.scheduler import Event, Scheduler, Ticket
from medusa_cli.serve.schema import ChatRequest, CompletionRequest

PAGE = Path(__file__).with_name("index.html")
# The page may run its own script and talk to this server, and nothing else.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
# Keeps the likeliest token alone, as OpenAI's 0 does.
MIN_TOP_P = 1e-9
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503)
}
ANSWERS: dict[int | str, dict[str, Any]] = {**REFUSALS, 200: {"content": {"text/event-stream": {}}}}


def build(medusa: Medusa, limits: Limits) -> tuple[Any, Scheduler]:
    """Returns the ASGI application, and the scheduler that its caller runs and drains."""
    metrics = Metrics()
    scheduler = Scheduler(medusa, metrics, slots=limits.slots, waiting=limits.waiting)
    app = FastAPI(title="medusa serve", version=__version__, docs_url=None, redoc_url=None)
    handler = Handler(medusa, scheduler, limits)
    model = {"id": limits.name, "object": "model", "created": int(time.time()), "owned_by": "medusa"}

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat(body: ChatRequest, http: HttpRequest) -> Any:
        return await handler.answer(body, http.receive)

    @app.post("/v1/completions", responses=ANSWERS)
    async def complete(body: CompletionRequest, http: HttpRequest) -> Any:
        return await handler.answer(body, http.receive)

    @app.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def retrieve(name: str) -> dict[str, Any]:
        if not name:
            raise HTTPException(404)
        handler.check_model(name)
        return model

    @app.get("/health", responses={503: {}})
    async def health() -> JSONResponse:
        well = scheduler.alive and not scheduler.closing
        return JSONResponse({"status": "ok" if well else "closing"}, 200 if well else 503)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def numbers() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": POLICY})

    @app.exception_handler(Refusal)
    async def refused(http: HttpRequest, reason: Refusal) -> Response:
        return reason.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, reason: RequestValidationError) -> Response:
        return refusal_for_body(reason.errors()).response()

    @app.exception_handler(HTTPException)
    async def unknown(http: HttpRequest, reason: HTTPException) -> Response:
        response = refusal_for_http(http.url.path, reason).response()
        response.headers.update(reason.headers or {})
        return response

    return Middleware(app, limits, metrics), scheduler


class Handler:
    """Submits completion requests to the scheduler and formats their answers."""

    def __init__(self, medusa: Medusa, scheduler: Scheduler, limits: Limits) -> None:
        self._medusa, self._scheduler, self._limits = medusa, scheduler, limits
        self._encoding = asyncio.Lock()  # two threads must not share a tokenizer

    def check_model(self, name: str) -> None:
        if name != self._limits.name:
            text = f"the model {shown(name)} is not served here; ask for {self._limits.name!r}"
            raise Refusal(404, text, param="model", code="model_not_found")

    async def answer(self, body: ChatRequest | CompletionRequest, receive: Receive) -> Response:
        """Returns the whole answer, or a stream of it; raises Refusal."""
        self.check_model(body.model)
        request = await self._request(body)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = self._scheduler.submit(request, deliver)
        answer = OpenAIFormat(self._medusa.backbone, body.model, ticket, chat=isinstance(body, ChatRequest))
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            lines = _stream(answer, ticket, _until_gone(ticket, events, receive), usage)
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async for event in _until_gone(ticket, events, receive):
            if event.error is not None:
                raise _failure(event.error)
        return JSONResponse(answer.whole())

    async def _request(self, body: ChatRequest | CompletionRequest) -> Request:
        """Returns the decoder's request, within the server's limits."""
        limits, backbone = self._limits, self._medusa.backbone
        limit = body.limit or limits.max_new_tokens
        if limit > limits.max_new_tokens and body.limit_field is not None:
            text = f"{body.limit_field} {limit:,} is more than the {limits.max_new_tokens:,} that this server gives"
            raise Refusal(400, text, param=body.limit_field, code="invalid_value")
        try:
            async with self._encoding:
                request = await run_in_threadpool(
                    self._medusa.request,
                    body.content,
                    max_new_tokens=min(limit, limits.max_new_tokens),
                    temperature=limits.temperature if body.temperature is None else body.temperature,
                    top_p=1.0 if body.top_p is None else max(body.top_p, MIN_TOP_P),
                    top_k=body.top_k or 0,
                    min_p=body.min_p,
                    seed=body.seed,
                    stop=body.stop_strings,
                    stop_ids=() if body.ignore_eos else None,
                    logprobs=body.top,
                    repetition_penalty=body.repetition_penalty,
                    presence_penalty=body.presence_penalty or None,
                    frequency_penalty=body.frequency_penalty or None,
                    min_new_tokens=body.min_tokens,
                    logit_bias=body.logit_bias or None,
                    raw=True,
                )
        except UserError as reason:
            refusal = refusal_for(reason, "messages" if isinstance(body, ChatRequest) else "prompt")
            # Clients must not learn the model's path on this machine.
            text = str(refusal).replace(backbone.id, limits.name)
            raise Refusal(refusal.status, text, param=refusal.param, code=refusal.code) from reason
        longest = min(limits.max_prompt_tokens, backbone.max_positions - 1)
        if len(request.prompt) > longest:
            text = f"the prompt has {len(request.prompt):,} tokens, this server takes {longest:,}"
            raise Refusal(400, text, code="context_length_exceeded")
        return request


async def _until_gone(ticket: Ticket, events: asyncio.Queue[Event], receive: Receive) -> AsyncIterator[Event]:
    """Yields the events up to the last; a client that goes away, or stops reading, frees its slot."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.abandoned = True

    watcher = asyncio.create_task(watch())
    try:
        while True:
            event = await events.get()
            if ticket.abandoned:
                return
            yield event
            if event.last:
                return
    finally:
        watcher.cancel()
        ticket.abandoned = True


async def _stream(
    answer: OpenAIFormat, ticket: Ticket, events: AsyncIterator[Event], usage: bool
) -> AsyncIterator[str]:
    """Yields the answer as server-sent events, one a step."""
    no_usage = {"usage": None} if usage else {}
    try:
        for chunk in answer.first_chunks():
            yield _line({**chunk, **no_usage})
        async for event in events:
            if event.error is not None:
                yield _line(_failure(event.error).body)
                return
            if event.pieces or event.likelihoods or event.last:
                yield _line({**answer.chunk(event), **no_usage})
    finally:
        ticket.abandoned = True
        await events.aclose()  # type: ignore[attr-defined]
    if usage:
        yield _line(answer.usage_chunk())
    yield "data: [DONE]\n\n"


def _line(data: dict[str, Any]) -> str:
    # In ASCII: many clients take U+2028 and its like, which JSON may hold, for the end of a line.
    return f"data: {json.dumps(data)}\n\n"


def _failure(reason: Exception) -> Refusal:
    """Returns the refusal for a request that failed after it was accepted, without details of internal errors."""
    if isinstance(reason, UserError):
        return refusal_for(reason)
    return Refusal(500, "the answer could not be finished", code="internal_error")
