"""A server's limits, and the middleware that checks the API key and the body before a request is parsed."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from medusa_cli.errors import shown
from medusa_cli.serve import neutral, record
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.refusals import Refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
OPEN = ("/health", "/metrics", "/openapi.json", "/version", "/")  # served without a key
# Paths that are served below /v1, too.
ANSWERING = (
    *("/chat/completions", "/completions", "/responses"),
    *("/models", "/messages", "/messages/count_tokens"),
)
OTHERS = ("tokenize", "detokenize", "apply-template", "props", "slots", "completion", "infill")
PATHS = (*OPEN, *ANSWERING, *(f"/v1{path}" for path in ANSWERING))
PATHS += tuple(f"/{name}" for name in OTHERS)
PATHS += tuple(f"/api/{name}" for name in ("chat", "generate", "tags", "show", "version"))
# A request id chosen by the client, which the response repeats.
REQUEST_ID = re.compile(r"[!-~]{1,128}")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Holds the names, keys and limits of a server.

    host: the address or name that the server listens on, "" for a Unix socket. allowed_hosts: further names under which
    clients may reach the server. slots: the number of requests that are decoded concurrently. waiting: the maximum
    number of requests in the queue. max_body: the largest body in bytes. Time limits for a client in seconds: head_s to
    send a request's head, body_s to send its body, read_s without reading the answer, idle_s between two requests.
    context: the maximum number of tokens of a prompt and its answer together, None for the model's. share: the same
    maximum for a request that sets no limit, None for the context. max_new_tokens: the maximum number of tokens of an
    answer, None for the rest of the context. template_s: the time limit for rendering the chat template. temperature:
    the default for requests that give none. cors: origins whose web pages may use the server.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    slots: int = 8
    waiting: int = 64
    context: int | None = None
    share: int | None = None
    max_new_tokens: int | None = None
    max_body: int = 1 << 20
    max_connections: int = 4096
    head_s: float = 10
    body_s: float = 20
    read_s: float = 30
    idle_s: int = 30
    template_s: float = 10
    temperature: float = 0.0
    cors: tuple[str, ...] = ()
    access_log: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None


class Middleware:
    """Passes each request on after its whole body has arrived.

    Refuses a wrong key, and a body that is too large or arrives too slowly. If the server has no keys, refuses an
    unknown Host: otherwise a web page whose name is made to point to this machine (DNS rebinding) could use the model.
    """

    def __init__(self, app: Any, limits: Limits, metrics: Metrics) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].endswith("/") and scope["path"] != "/":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        path = scope["path"] if scope["path"] in PATHS else "other"
        headers = Headers(scope=scope)
        started = time.monotonic()
        given = headers.get("x-request-id", "")
        ignored = dict[str, None]()
        neutral.ignored.set(ignored)
        record.allowed.set(headers.get(record.HEADER, "").strip().lower() not in record.NO)
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                # The header's name in Anthropic's API.
                answered["request-id"] = request_id
                if ignored:
                    answered[neutral.HEADER] = ", ".join(ignored)
                self._metrics.responses.labels(path, str(status)).inc()
                if self._limits.access_log:
                    client = scope["client"][0] if scope["client"] else "-"
                    seconds = f"{time.monotonic() - started:.3f} s"
                    asked = f"{scope['method']} {shown(scope['path'])}"
                    log.info(f"{client} {asked} {status} {seconds} {request_id}")
            await send(message)

        try:
            if not self._limits.api_keys:
                self._check_host(headers)
            # Browsers send OPTIONS first, without a key.
            elif scope["path"] not in OPEN and scope["method"] != "OPTIONS":
                self._check_key(headers)
            body = await asyncio.wait_for(self._read(headers, receive), self._limits.body_s)
        except Refusal as reason:
            await reason.response(scope["path"])(scope, receive, counted)
            return
        except TimeoutError:
            text = f"the body took more than {self._limits.body_s:g} s"
            slow = Refusal(408, text, code="timeout")
            await slow.response(scope["path"])(scope, receive, counted)
            return
        if body is None:  # the client has disconnected
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        # Uvicorn omits the body of a response to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._app({**scope, "method": method}, replay, counted)

    def _check_host(self, headers: Headers) -> None:
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        # Browsers always send the Host header, and cannot connect to a Unix socket.
        own = (self._limits.host, *self._limits.allowed_hosts)
        if not self._limits.host or host in ("", "localhost", *(name.lower() for name in own)):
            return
        try:
            ip_address(host.strip("[]"))  # an IP address is safe from DNS rebinding
        except ValueError:
            text = f"the host {shown(host)} is not served here; whoever runs this server can add it with --allow-host"
            raise Refusal(403, text, code="invalid_host") from None

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer":
            # Clients of Anthropic and llama.cpp send x-api-key, those of Azure api-key.
            given = headers.get("x-api-key", headers.get("api-key", "")).encode("latin-1")
        # All keys are compared, so that the time taken reveals nothing.
        right = [hmac.compare_digest(given.strip(), key.encode()) for key in self._limits.api_keys]
        if not any(right):
            text = "the API key is missing or wrong; send it as a bearer token"
            raise Refusal(401, text, code="invalid_api_key")

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Returns the whole body, or None if the client disconnects early; raises Refusal if the body is too large."""
        limit = self._limits.max_body
        too_large = Refusal(413, f"the body is larger than {limit:,} bytes", code="too_large")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_large
            if not message.get("more_body"):
                return bytes(body)
