"""The parsing of request bodies; large bodies are parsed in a thread, so that other clients need not wait."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from medusa_cli.serve.refusals import refusal_for_body

# Bodies with fewer bytes than this are parsed in the event loop, which takes some milliseconds.
SMALL = 16 << 10


class BodyRoute(APIRoute):
    """Parses and validates large bodies in a thread, one body at a time per route."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        body = signature(self.endpoint).parameters.get("body")
        if body is None:
            return handle
        model = TypeAdapter[Any](body.annotation)
        lock = asyncio.Lock()

        async def parsed(request: Request) -> Response:
            return await handle(BodyRequest(request, model, lock))

        return parsed


class BodyRequest(Request):
    """A request whose `json` returns a validated model, instead of parsed JSON, if the body is large."""

    def __init__(self, request: Request, model: TypeAdapter[Any], lock: asyncio.Lock) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self._lock = lock

    async def json(self) -> Any:
        if len(await self.body()) < SMALL:
            return await super().json()
        async with self._lock:
            return await run_in_threadpool(self._parse, await self.body())

    def _parse(self, body: bytes) -> Any:
        """Returns the validated model; raises Refusal for an invalid body."""
        value = json.loads(body)
        try:
            return self._model.validate_python(value)
        except ValidationError as reason:
            raise refusal_for_body(
                reason.errors(include_url=False, include_input=False)
            ) from reason
