"""Refusals in OpenAI's form: a message, the parameter it is about, a code."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from medusa_cli.errors import UserError, worded
from medusa_cli.serve.schema import LIST, TEXT

TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """What every refusal looks like."""

    error: ErrorDetail


class Refusal(Exception):
    """A request that is not answered: its status, why, and the parameter that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_s = status, retry_s
        # Half characters, which JSON can bring, cannot be sent back.
        param = None if param is None else whole(param)
        self.detail = ErrorDetail(
            message=whole(message), type=TYPES.get(status, "invalid_request_error"), param=param, code=code
        )

    @property
    def body(self) -> dict[str, Any]:
        return ErrorBody(error=self.detail).model_dump()

    def response(self) -> JSONResponse:
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):  # the rest of the body is still on its way
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


def whole(text: str) -> str:
    """A text without half characters."""
    return text.encode(errors="replace").decode()


def refusal_for(reason: UserError, param: str | None = None) -> Refusal:
    """What a client hears of what cannot be; param: what is to blame where no setting is."""
    said, setting = worded(reason.text, _field), reason.about
    if setting is not None:
        return Refusal(400, said, param=_field(setting), code="invalid_value")
    return Refusal(400, f"{param}: {said}" if param else said, param=param, code="invalid_prompt")


def _field(setting: str) -> str:
    """A setting as OpenAI's requests name it."""
    return {"max_new_tokens": "max_tokens"}.get(setting, setting)


def refusal_of(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """The first of pydantic's errors in words that name the parameter."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body", TEXT, LIST)]
    param = ".".join(place) or None
    kind, said = str(first["type"]), str(first["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        return Refusal(400, "the body is no JSON", code="invalid_json")
    if kind == "model_attributes_type" and not place:
        sent = isinstance(first.get("input"), bytes)  # as curl sends it without a header, for one
        what = "was not sent as JSON; add the header Content-Type: application/json" if sent else "is no JSON object"
        return Refusal(400, f"the body {what}", code="invalid_json")
    if kind == "extra_forbidden":
        return Refusal(400, f"the parameter {param!r} is not supported; leave it out", param=param, code="unsupported")
    known = {part for part in place if part.isidentifier()}
    if known & UNSUPPORTED:
        name = next(part for part in place if part in UNSUPPORTED)
        return Refusal(400, f"{name!r} is only supported at its default: {said}", param=param, code="unsupported")
    return Refusal(400, f"{param}: {said}" if param else said, param=param, code="invalid_value")


# Parameters with one value that can be honoured.
UNSUPPORTED = {
    "n",
    "best_of",
    "echo",
    "suffix",
    "store",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "tools",
    "tool_calls",
    "tool_choice",
    "response_format",
    "annotations",
}
