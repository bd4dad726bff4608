"""What a server allows and asks for."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from medusa_cli import __version__
from medusa_cli.api import Medusa
from medusa_cli.errors import UserError
from medusa_cli.serve.errors import ErrorBody, Refusal, refusal_for, refusal_of
from medusa_cli.serve.limits import Limits
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.middleware import AuthMiddleware
from medusa_cli.serve.openai_format import OpenAIFormat
from medusa_cli.serve.scheduler import Closing, Event, Full, Scheduler, Ticket
from medusa_cli.serve.schema import ChatRequest, CompletionRequest

PAGE = Path(__file__).with_name("index.html")
# The page may run what is in it and talk to this server, and nothing else.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 500, 503)
}
ANSWERS: dict[int | str, dict[str, Any]] = {**REFUSALS, 200: {"content": {"text/event-stream": {}}}}


def build(medusa: Medusa, limits: Limits) -> tuple[Any, Scheduler]:
    """The ASGI application and the scheduler it feeds, which the caller starts and drains."""
    metrics = Metrics()
    scheduler = Scheduler(medusa, metrics, slots=limits.slots, waiting=limits.waiting)
    app = FastAPI(title="medusa serve", version=__version__, docs_url=None, redoc_url=None)
    desk = Handler(medusa, scheduler, limits)
    began = int(time.time())
    model = {"id": limits.name, "object": "model", "created": began, "owned_by": "medusa"}

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat(body: ChatRequest, request: Request) -> Any:
        return await desk.answer(body, [message.plain for message in body.messages], request)

    @app.post("/v1/completions", responses=ANSWERS)
    async def complete(body: CompletionRequest, request: Request) -> Any:
        return await desk.answer(body, body.prompt, request)

    @app.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def one_model(name: str) -> dict[str, Any]:
        desk.check_model(name)
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
    async def refused(request: Request, reason: Refusal) -> Response:
        return reason.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, reason: RequestValidationError) -> Response:
        return refusal_of(reason.errors()).response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, reason: HTTPException) -> Response:
        response = Refusal(reason.status_code, str(reason.detail)).response()
        response.headers.update(reason.headers or {})
        return response

    return AuthMiddleware(app, limits, metrics, lambda: scheduler.closing), scheduler


class Handler:
    """Takes completion requests to the scheduler and brings the answers back."""

    def __init__(self, medusa: Medusa, scheduler: Scheduler, limits: Limits) -> None:
        self._medusa, self._scheduler, self._limits = medusa, scheduler, limits
        self._encoding = asyncio.Lock()  # a tokenizer is no place for two threads

    def check_model(self, name: str) -> None:
        if name != self._limits.name:
            said = f"the model {name!r} is not served here; ask for {self._limits.name!r}"
            raise Refusal(404, said, param="model", code="model_not_found")

    async def answer(self, body: ChatRequest | CompletionRequest, prompt: Any, request: Request) -> Response:
        """The whole answer, or a stream of it; Refusal for what cannot be answered."""
        self.check_model(body.model)
        wording = OpenAIFormat(self._medusa.backbone, body.model, chat=isinstance(body, ChatRequest))
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        asked = await self._asked(body, prompt)
        try:
            ticket = self._scheduler.submit(asked, deliver)
        except Full:
            wait = self._scheduler.wait_s
            raise Refusal(429, f"too many requests; try again in {wait} s", code="queue_full", retry_s=wait) from None
        except Closing:
            raise Refusal(503, "the server is about to stop", code="closing", retry_s=10) from None
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            lines = _stream(wording, ticket, events, request.receive, usage)
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async for event in _until_gone(ticket, events, request.receive):
            if event.error is not None:
                raise _failure(event.error)
        return JSONResponse(wording.whole(ticket))

    async def _asked(self, body: ChatRequest | CompletionRequest, prompt: Any) -> Any:
        """What is asked of the decoder, within the server's limits."""
        limits = self._limits
        limit = body.limit or limits.max_new_tokens
        if limit > limits.max_new_tokens and body.limiting is not None:
            said = f"{body.limiting} {limit:,} is more than the {limits.max_new_tokens:,} that this server gives"
            raise Refusal(400, said, param=body.limiting, code="invalid_value")
        try:
            async with self._encoding:
                asked = await run_in_threadpool(
                    self._medusa.request,
                    prompt,
                    max_new_tokens=min(limit, limits.max_new_tokens),
                    temperature=limits.temperature if body.temperature is None else body.temperature,
                    top_p=1.0 if body.top_p is None else body.top_p,
                    top_k=body.top_k or 0,
                    seed=body.seed if body.seed is not None else secrets.randbits(62),
                    stop=body.stops,
                    logprobs=body.top,
                    raw=True,
                )
        except UserError as reason:
            # Where the model lies on this machine is nobody's business.
            refusal = refusal_for(reason, "messages" if isinstance(body, ChatRequest) else "prompt")
            refusal.detail.message = refusal.detail.message.replace(self._medusa.backbone.id, limits.name)
            raise refusal from reason
        most = min(limits.max_prompt_tokens, self._medusa.backbone.max_positions - 1)
        if len(asked.prompt) > most:
            said = f"the prompt has {len(asked.prompt):,} tokens, this server takes {most:,}"
            raise Refusal(400, said, code="context_length_exceeded")
        return asked


async def _until_gone(
    ticket: Ticket, events: asyncio.Queue[Event], receive: Callable[[], Awaitable[Any]]
) -> AsyncIterator[Event]:
    """The events up to the last; a client that goes away, or stops listening, leaves its slot."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.leave()

    watching = asyncio.create_task(watch())
    try:
        while True:
            event = await events.get()
            if ticket.left:
                return
            yield event
            if event.last:
                return
    finally:
        watching.cancel()
        ticket.leave()


async def _stream(
    wording: OpenAIFormat,
    ticket: Ticket,
    events: asyncio.Queue[Event],
    receive: Callable[[], Awaitable[Any]],
    usage: bool,
) -> AsyncIterator[str]:
    """The answer as server-sent events, a chunk a step."""
    extra = {"usage": None} if usage else {}
    for chunk in wording.opening():
        yield _line({**chunk, **extra})
    listening = _until_gone(ticket, events, receive)
    try:
        async for event in listening:
            if event.error is not None:
                yield _line(_failure(event.error).body)
                return
            if event.pieces or event.likelihoods or event.last:
                yield _line({**wording.chunk(ticket, event.pieces, event.likelihoods, event.last), **extra})
    finally:
        await listening.aclose()  # type: ignore[attr-defined]
    if usage:
        yield _line(wording.closing(ticket))
    yield "data: [DONE]\n\n"


def _line(data: dict[str, Any]) -> str:
    # In ASCII: many clients take U+2028 and its like, which JSON may hold, for the end of a line.
    return f"data: {json.dumps(data)}\n\n"


def _failure(reason: Exception) -> Refusal:
    """What a client hears of a request that failed on its way; our own faults without their details."""
    if isinstance(reason, UserError):
        return refusal_for(reason)
    return Refusal(500, "the answer could not be finished", code="internal_error")
