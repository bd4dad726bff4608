"""Refusals in OpenAI's format, with a message, the parameter at fault and a code."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from medusa_cli.decode.grammar import KINDS
from medusa_cli.errors import UserError, cut, in_words, is_out_of_memory, shown
from medusa_cli.files.io import HALF, is_whole
from medusa_cli.serve.schema import BLOCKS, FORMS, ITEMS

# Seconds after which a client may retry a request that failed for lack of memory.
MEMORY_RETRY_S = 10
LONGEST_NAME = 100  # maximum number of characters of a field's name
TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of a refusal in OpenAI's format, declared for the OpenAPI schema."""

    error: ErrorDetail


class MessagesError(BaseModel):
    """The body of a refusal in Anthropic's format."""

    class Detail(BaseModel):
        type: str
        message: str

    type: Literal["error"]
    error: Detail


class TextError(BaseModel):
    """The body of a refusal in Ollama's format."""

    error: str


class Refusal(Exception):
    """Ends a request with an HTTP status, a message, and the parameter at fault.

    kind: the error type, None for the usual type of the status. more: additional fields of the body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        kind: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(_printable(message))
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s
        self.kind = kind or TYPES.get(status, "invalid_request_error")
        self.more = dict(more or {})

    def renamed(self, fields: Mapping[str, str]) -> "Refusal":
        """Returns the same refusal with another API's field names."""
        field = str(self.param).partition(".")[0]
        if field not in fields:
            return self
        param = fields[field]
        message = str(self).replace(str(self.param), param)
        given: dict[str, Any] = {
            "code": self.code,
            "retry_s": self.retry_s,
            "kind": self.kind,
            "more": self.more,
        }
        return Refusal(self.status, message, param=param, **given)

    @property
    def body(self) -> dict[str, Any]:
        """Returns the body in OpenAI's format."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self.more}}

    def body_for(self, path: str) -> dict[str, Any]:
        """Returns the body in the format of the API that a path belongs to."""
        if path.removeprefix("/v1").startswith("/messages"):
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        return {"error": str(self)} if path.startswith("/api/") else self.body

    def response(self, path: str) -> Response:
        """Returns the response to a request for a path."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):  # the rest of the body is still on its way
            headers["Connection"] = "close"
        # ASCII, because a request may contain lone surrogates, which UTF-8 cannot encode.
        return Response(json.dumps(self.body_for(path)), self.status, headers, "application/json")


def _printable(text: str) -> str:
    """Returns a text, shortened and with its control characters escaped, because clients print messages as they are."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in cut(text))


def refusal_for(reason: UserError, param: str | None = None) -> Refusal:
    """Returns the refusal for a UserError; `param` is the parameter at fault if the error mentions no setting."""

    def field(setting: str) -> str:
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        return str(param) if setting in KINDS else names.get(setting, setting)

    text = in_words(reason.text, field)
    setting = reason.setting
    if setting is not None:
        return Refusal(400, text, param=field(setting), code="invalid_value")
    return Refusal(400, f"{param}: {text}" if param else text, param=param, code="invalid_prompt")


def check_whole(body: BaseModel) -> None:
    """Raises Refusal, which names the place, if a text in the request has half a character (a lone surrogate)."""
    if (place := _half_in(body.model_dump(by_alias=True, exclude_none=True))) is not None:
        param = ".".join(place)
        text = f"{param}: the text holds {HALF}, such as one cut out of an emoji; send whole ones"
        raise Refusal(400, text, param=param, code="invalid_value")


def _half_in(value: Any) -> list[str] | None:
    """Returns the keys that lead to the first text with half a character; None if there is none."""
    if isinstance(value, str):
        return None if is_whole(value) else []
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for key, part in parts:
        if not is_whole(str(key)):
            return []
        if (place := _half_in(part)) is not None:
            return [str(key), *place]
    return None


def too_long(tokens: int, context: int) -> Refusal:
    """Returns the refusal for a prompt with too many tokens, with the error fields of OpenAI and llama.cpp."""
    return Refusal(
        400,
        f"the prompt has {tokens:,} tokens and exceeds the context of {context:,}, which prompt and answer share",
        code="context_length_exceeded",
        kind="exceed_context_size_error",
        more={"n_prompt_tokens": tokens, "n_ctx": context},
    )


def failure(reason: Exception) -> Refusal:
    """Returns the refusal for a request that failed after it was accepted, without details of internal errors."""
    if isinstance(reason, UserError):
        return refusal_for(reason)
    if is_out_of_memory(reason):
        text = "the server has no memory left for this answer; send a shorter prompt, or try again later"
        return Refusal(503, text, code="out_of_memory", retry_s=MEMORY_RETRY_S)
    return Refusal(500, "the answer could not be finished", code="internal_error")


def refusal_for_http(path: str, reason: HTTPException) -> Refusal:
    """Returns the refusal for a path or method that is not served, or a body that the web framework could not parse."""
    status = reason.status_code
    cause = reason.__cause__
    if isinstance(cause, Refusal):
        return cause
    if status == 404:
        return Refusal(status, f"the path {shown(path)} is not served", code="not_found")
    if status == 400 and isinstance(cause, UnicodeDecodeError):
        text = "the body is not UTF-8; send it as such, not compressed"
        return Refusal(status, text, code="invalid_json")
    if status == 400 and isinstance(cause, RecursionError):
        return Refusal(status, "the body is nested too deeply", code="invalid_json")
    return Refusal(status, str(reason.detail), code="invalid_json" if status == 400 else None)


def refusal_for_body(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """Returns the refusal for the first of pydantic's validation errors in a body."""
    first = errors[0]
    forms = ("body", *FORMS, *ITEMS, *BLOCKS)
    path = [cut(str(part), LONGEST_NAME) for part in first["loc"] if part not in forms]
    param = ".".join(path) or None
    kind = str(first["type"])
    text = str(first["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        return Refusal(400, "the body is not JSON", code="invalid_json")
    if kind == "missing" and not path:
        return Refusal(400, "the body is empty; send a JSON object", code="invalid_json")
    if kind == "model_attributes_type" and not path:
        fault = "is not a JSON object"
        if isinstance(first.get("input"), bytes):  # as from curl without the header
            fault = "was not sent as JSON; add the header Content-Type: application/json"
        return Refusal(400, f"the body {fault}", code="invalid_json")
    if kind == "extra_forbidden":
        text = f"the parameter {param!r} is not supported; leave it out"
        return Refusal(400, text, param=param, code="unsupported")
    return Refusal(400, f"{param}: {text}" if param else text, param=param, code="invalid_value")
