"""Before a request is looked at: its key, its body's size and how long that takes, and whether the server closes."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers

from medusa_cli.serve.errors import Refusal
from medusa_cli.serve.limits import Limits
from medusa_cli.serve.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/openapi.json", "/")


class AuthMiddleware:
    """Hands on what may pass, its body whole; refuses the rest. /v1 alone needs the key."""

    def __init__(self, app: Any, limits: Limits, metrics: Metrics, closing: Callable[[], bool]) -> None:
        self._app, self._limits, self._metrics, self._closing = app, limits, metrics, closing

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.response(path, message["status"])
            await send(message)

        try:
            self._check(scope)
            whole = await asyncio.wait_for(self._body(Headers(scope=scope), receive), self._limits.body_s)
        except Refusal as reason:
            await reason.response()(scope, receive, counted)
            return
        except asyncio.TimeoutError:
            slow = Refusal(408, f"the body took more than {self._limits.body_s:g} s to come", code="timeout")
            await slow.response()(scope, receive, counted)
            return
        if whole is None:
            return
        given = [{"type": "http.request", "body": whole, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replay, counted)

    def _check(self, scope: Message) -> None:
        if not scope["path"].startswith("/v1/"):
            return
        if self._limits.api_key:
            said = Headers(scope=scope).get("authorization", "")
            if not hmac.compare_digest(said.encode("latin-1"), f"Bearer {self._limits.api_key}".encode()):
                raise Refusal(401, "the API key is missing or wrong; send it as a bearer token", code="invalid_api_key")
        if scope["method"] == "POST" and self._closing():
            raise Refusal(503, "the server is about to stop", code="closing", retry_s=10)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """All of the body; None where the client went away before its end."""
        most = self._limits.max_body
        too_large = Refusal(413, f"the body is larger than {most:,} bytes", code="too_large")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            raise too_large
        whole = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            whole += message.get("body", b"")
            if len(whole) > most:
                raise too_large
            if not message.get("more_body"):
                return bytes(whole)
