"""The ASGI application: the routes of the APIs of OpenAI, Anthropic, llama.cpp and Ollama, and the server's own."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from medusa_cli import __version__
from medusa_cli.api import Medusa
from medusa_cli.serve import llama_cpp, messages, neutral, ollama, responses
from medusa_cli.serve.bodies import BodyRoute
from medusa_cli.serve.chats import ChatRequest
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.handler import Handler, renamed, translated
from medusa_cli.serve.llama_cpp import InfillRequest, LlamaRequest
from medusa_cli.serve.messages import MessagesFormat, MessagesRequest
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.middleware import Limits, Middleware
from medusa_cli.serve.ollama import OllamaChat, OllamaFormat, OllamaGenerate, ShowRequest
from medusa_cli.serve.refusals import (
    ErrorBody,
    MessagesError,
    Refusal,
    TextError,
    check_whole,
    failure,
    refusal_for_body,
    refusal_for_http,
)
from medusa_cli.serve.responses import ResponsesFormat, ResponsesRequest
from medusa_cli.serve.scheduler import Scheduler
from medusa_cli.serve.templates import TemplateProcess
from medusa_cli.serve.tokens import DetokenizeRequest, TokenizeRequest

PAGE = Path(__file__).with_name("index.html")
# The web page may run only its own script, and may connect only to this server.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)
# Origins of web pages that this machine serves; other model servers allow these origins, too.
LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
STATUSES = (400, 401, 403, 404, 408, 413, 429, 500, 503)


def refusals(body: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the refusals of a route by status, for the OpenAPI schema."""
    return {status: {"model": body} for status in statuses or STATUSES}


def answers(body: type[BaseModel], media: str) -> dict[int | str, dict[str, Any]]:
    """Returns a route's answers, which may be streams of type `media`, and its refusals, for the OpenAPI schema."""
    return {**refusals(body), 200: {"content": {media: {}}}}


REFUSALS = refusals(ErrorBody)
ANSWERS = answers(ErrorBody, "text/event-stream")
MESSAGES = answers(MessagesError, "text/event-stream")
LINES = answers(TextError, "application/x-ndjson")


def build(medusa: Medusa, limits: Limits, templates: TemplateProcess) -> tuple[Any, Scheduler]:
    """Returns the ASGI application, and the scheduler that the caller runs and drains."""
    metrics = Metrics(limits.names[0])
    scheduler = Scheduler(medusa, metrics, slots=limits.slots, waiting=limits.waiting)
    app = FastAPI(title="medusa serve", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    handler = Handler(medusa, scheduler, limits, templates)
    started = int(time.time())
    _add_openai(app, handler, started)
    _add_anthropic(app, handler)
    _add_llama_cpp(app, handler)
    _add_ollama(app, handler, started)
    _add_own(app, scheduler, metrics)
    _add_refusals(app)

    # CORS comes before the check of the API key, because browsers send preflight requests without a key.
    allowed: Any = {"allow_origins": limits.cors, "allow_origin_regex": LOCAL_PAGES}
    any_method: Any = {"allow_methods": ["*"], "allow_headers": ["*"]}
    any_method["expose_headers"] = ["x-request-id", neutral.HEADER]
    return CORSMiddleware(Middleware(app, limits, metrics), **allowed, **any_method), scheduler


def _add_openai(app: FastAPI, handler: Handler, started: int) -> None:
    """Adds the routes of OpenAI's API."""

    def model(name: str) -> dict[str, Any]:
        sizes = handler.backbone
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "medusa",
            "root": name,
            "parent": None,
            "max_model_len": handler.preparation.context,
            "meta": {"n_ctx_train": sizes.max_positions, "n_vocab": sizes.vocab_size},
        }

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

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models", responses={401: REFUSALS[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in handler.names]}

    @app.get("/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}", responses={401: REFUSALS[401], 404: REFUSALS[404]})
    async def retrieve(name: str) -> dict[str, Any]:
        if not name:
            raise HTTPException(404)
        handler.preparation.check_model(name)
        return model(name)


def _add_anthropic(app: FastAPI, handler: Handler) -> None:
    """Adds the routes of Anthropic's API."""

    @app.post("/messages", include_in_schema=False)
    @app.post("/v1/messages", responses=MESSAGES)
    async def message(body: MessagesRequest, http: HttpRequest) -> Any:
        with renamed(messages.FIELDS):
            chat = await translated(body, body.chat)
            shape = partial(MessagesFormat, handler.backbone, chat)
            return await handler.answer(chat, http.receive, shape)

    @app.post("/messages/count_tokens", include_in_schema=False)
    @app.post("/v1/messages/count_tokens", responses=refusals(MessagesError))
    async def count_tokens(body: MessagesRequest) -> dict[str, int]:
        with renamed(messages.FIELDS):
            chat = await translated(body, body.chat)
            return {"input_tokens": await handler.count(chat)}


def _add_llama_cpp(app: FastAPI, handler: Handler) -> None:
    """Adds the routes of llama.cpp's server, and vLLM's routes for tokens."""

    @app.post("/completion", responses=ANSWERS)
    async def continued(body: LlamaRequest, http: HttpRequest) -> Any:
        with renamed(llama_cpp.FIELDS):
            return await handler.continued(body, body.prompt, http.receive)

    @app.post("/infill", responses=ANSWERS)
    async def infill(body: InfillRequest, http: HttpRequest) -> Any:
        with renamed(llama_cpp.FIELDS):
            return await handler.infill(body, http.receive)

    @app.post("/tokenize", responses=REFUSALS)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await handler.tokenize(body)

    @app.post("/detokenize", responses=REFUSALS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        return await handler.detokenize(body)

    @app.post("/apply-template", responses=REFUSALS)
    async def apply_template(body: ChatRequest) -> dict[str, str]:
        if body.model is not None:
            handler.preparation.check_model(body.model)
        await run_in_threadpool(check_whole, body)
        return {"prompt": await handler.preparation.render(body)}

    @app.get("/props", responses={401: REFUSALS[401]})
    async def props() -> dict[str, Any]:
        return handler.props()

    @app.get("/slots", responses={401: REFUSALS[401]})
    async def slots() -> list[dict[str, Any]]:
        return handler.slots()


def _add_ollama(app: FastAPI, handler: Handler, started: int) -> None:
    """Adds the routes of Ollama's API."""

    @app.post("/api/chat", responses=LINES)
    async def ollama_chat(body: OllamaChat, http: HttpRequest) -> Any:
        return await ollama_answer(body, http)

    @app.post("/api/generate", responses=LINES)
    async def ollama_generate(body: OllamaGenerate, http: HttpRequest) -> Any:
        return await ollama_answer(body, http)

    async def ollama_answer(body: OllamaChat | OllamaGenerate, http: HttpRequest) -> Any:
        with renamed(ollama.FIELDS):
            if body.is_empty:
                return ollama.loaded(body, handler.names[0])
            given = await translated(body, body.translated)
            shape = partial(OllamaFormat, given, isinstance(body, OllamaChat))
            return await handler.answer(given, http.receive, shape)

    @app.get("/api/tags", responses=refusals(TextError, 401))
    async def tags() -> dict[str, Any]:
        return ollama.listed(handler.backbone, handler.names, started)

    @app.post("/api/show", responses=refusals(TextError))
    async def show(body: ShowRequest) -> dict[str, Any]:
        if name := body.model or body.name:
            handler.preparation.check_model(name.removesuffix(":latest"))
        return ollama.described(handler.backbone, handler.preparation.context, started)

    @app.get("/api/version", responses=refusals(TextError, 401))
    async def api_version() -> dict[str, str]:
        return {"version": ollama.VERSION}


def _add_own(app: FastAPI, scheduler: Scheduler, metrics: Metrics) -> None:
    """Adds the server's own routes: its state, its metrics and its page."""

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


def _add_refusals(app: FastAPI) -> None:
    """Adds handlers that answer each error in the format of the API that was called."""

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
