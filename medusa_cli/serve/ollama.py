"""Ollama's API: request bodies, their conversion to chats and completions, and answers line by line."""

import json
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from medusa_cli.model import Backbone
from medusa_cli.serve import neutral
from medusa_cli.serve.answer_fields import Sampling
from medusa_cli.serve.answer_format import AnswerFormat
from medusa_cli.serve.calls import read_calls
from medusa_cli.serve.chats import ChatRequest, Tool, ToolCall, functions_of
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.infill import can_infill
from medusa_cli.serve.openai_format import fingerprint_of
from medusa_cli.serve.refusals import Refusal
from medusa_cli.serve.scheduler import Event, Ticket
from medusa_cli.serve.schema import MAX_TOOLS, OBJECT, TEXT, Strict
from medusa_cli.serve.tools import template_of

# The version of Ollama whose API this is; clients refuse much older versions.
VERSION = "0.6.4"
# Field names of Ollama, by the equivalent fields of chats and completions.
FIELDS = {"max_tokens": "options.num_predict", "json_schema": "format", "response_format": "format"}


class Options(Sampling):
    """Sampling and stop criteria."""

    place = "options."
    num_predict: int = Field(-1, ge=-2)


class OllamaMessage(Strict):
    """A turn of a conversation."""

    place = "messages[]."
    unserved = {"images": neutral.only([])}
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = []
    tool_name: str | None = None

    @property
    def chat_message(self) -> dict[str, Any]:
        """Returns the message as a chat has it; in Ollama's API, results of tools have no id."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.role == "tool":
            message |= {"tool_call_id": "", "name": self.tool_name}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class OllamaRequest(Strict):
    """The fields that the bodies of /api/chat and /api/generate share."""

    model: str | None = None
    stream: bool = True
    options: Options = Field({}, validate_default=True)
    think: bool | str | None = None
    record: bool = True
    format: (
        Annotated[
            Annotated[Literal["", "json"], Tag(TEXT)] | Annotated[dict[str, Any], Tag(OBJECT)],
            Discriminator(lambda value: OBJECT if isinstance(value, dict) else TEXT),
        ]
        | None
    ) = None

    def _shared(self) -> dict[str, Any]:
        """Returns the fields of an equivalent chat or completion."""
        options = self.options
        shared = {*Sampling.model_fields} & options.model_fields_set - {"model", "stream"}
        body = options.model_dump(include=shared, by_alias=True)
        # Ollama's clients add the tag :latest to a model's name.
        model = self.model and self.model.removesuffix(":latest")
        body |= {"stream": self.stream, "model": model}
        if self.format == "json":
            body["structured_outputs"] = {"json_object": True}
        elif self.format:
            body["json_schema"] = self.format
        return body

    @property
    def _limit(self) -> int | None:
        return max(self.options.num_predict, 1) if self.options.num_predict >= 0 else None

    def _chat(self, messages: list[dict[str, Any]], **more: Any) -> ChatRequest:
        thinking = "reasoning_effort" if isinstance(self.think, str) else "enable_thinking"
        given: dict[str, Any] = {"messages": messages, "max_tokens": self._limit, **more}
        given[thinking] = self.think
        return ChatRequest(**self._shared(), **given)


class OllamaChat(OllamaRequest):
    """The body of /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = []
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)

    _functions = field_validator("tools", mode="before")(functions_of)

    @property
    def is_empty(self) -> bool:
        """Returns True for a request that only loads the model."""
        return not self.messages

    def translated(self) -> ChatRequest:
        """Returns the equivalent chat."""
        messages = [message.chat_message for message in self.messages]
        return self._chat(messages, tools=[tool.model_dump() for tool in self.tools])


class OllamaGenerate(OllamaRequest):
    """The body of /api/generate."""

    unserved = {**neutral.named(neutral.only([]), "images context"), "template": neutral.only("")}
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False

    @property
    def is_empty(self) -> bool:
        """Returns True for a request that only loads the model."""
        return not self.prompt and not self.suffix

    def translated(self) -> ChatRequest | CompletionRequest:
        """Returns the equivalent chat; for a raw prompt or a prompt with a suffix, the equivalent completion."""
        if self.raw or self.suffix:
            limit = -1 if self._limit is None else self._limit
            given: dict[str, Any] = {
                "prompt": self.prompt or " ",
                "suffix": self.suffix,
                "max_tokens": limit,
            }
            return CompletionRequest(**self._shared(), **given)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat([*system, {"role": "user", "content": self.prompt}])


class ShowRequest(Strict):
    """The body of /api/show."""

    model: str | None = None
    name: str | None = Field(None, description="the former name of model")


class OllamaFormat(AnswerFormat):
    """Formats the answer to one request as lines of JSON."""

    media = "application/x-ndjson"
    keep_alive = ""

    def __init__(
        self, body: ChatRequest | CompletionRequest, is_chat: bool, ticket: Ticket
    ) -> None:
        super().__init__(ticket)
        self._model = body.model or ""
        self._is_chat = is_chat
        self._names = body.offered_names if isinstance(body, ChatRequest) else []
        self._text = ""
        self._sent = 0  # characters of the content

    def whole(self) -> dict[str, Any]:
        self._text = self._ticket.answer.text
        return self._part(last=True)

    def read(self, event: Event) -> list[str]:
        self._text += event.text
        part = self._part(event.last)
        text = part["message"]["content"] if self._is_chat else part["response"]
        return [_line(part)] if text or event.last else []

    def failed(self, reason: Refusal) -> str:
        return _line({"error": str(reason)})

    def _part(self, last: bool) -> dict[str, Any]:
        """Returns an object with the answer's new content; the last object also has the calls and figures."""
        content, calls = read_calls(self._text, self._names, last)
        text = content[self._sent :]
        self._sent = len(content)
        part: dict[str, Any] = {"model": self._model, "created_at": _now()}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if last and calls:
            message["tool_calls"] = [
                {"function": {"name": name, "arguments": json.loads(arguments)}}
                for name, arguments in calls
            ]
        part |= {"message": message} if self._is_chat else {"response": text}
        return {**part, "done": last, **(self._figures() if last else {})}

    def _figures(self) -> dict[str, Any]:
        """Returns the finish reason, and the numbers of tokens and the nanoseconds of prompt and answer."""
        stats = self._ticket.answer.stats
        return {
            "done_reason": self._ticket.answer.finish_reason,
            "total_duration": _nanoseconds(self._ticket.seconds),
            "load_duration": 0,
            "prompt_eval_count": len(self._ticket.request.prompt),
            "prompt_eval_duration": _nanoseconds(stats.prefill_s),
            "eval_count": stats.tokens,
            "eval_duration": _nanoseconds(stats.draft_s + stats.verify_s),
        }


def loaded(body: OllamaChat | OllamaGenerate, model: str) -> dict[str, Any]:
    """Returns the answer to a request that only loads the model."""
    text: dict[str, Any] = {"response": ""}
    if isinstance(body, OllamaChat):
        text = {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": _now(), **text, "done": True, "done_reason": "load"}


def listed(backbone: Backbone, names: Collection[str], started: float) -> dict[str, Any]:
    """Returns the list of models, which has one entry for each name of the model."""
    model = {
        "modified_at": datetime.fromtimestamp(started, UTC).isoformat(),
        "size": 0,
        "digest": fingerprint_of(backbone),
        "details": _details(backbone),
    }
    return {"models": [{"name": name, "model": name, **model} for name in names]}


def described(backbone: Backbone, context: int, started: float) -> dict[str, Any]:
    """Returns the description of the model."""
    family = _details(backbone)["family"]
    can = {"completion": True, "tools": bool(template_of(backbone)), "insert": can_infill(backbone)}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template_of(backbone),
        "details": _details(backbone),
        "model_info": {"general.architecture": family, f"{family}.context_length": context},
        "capabilities": [name for name, given in can.items() if given],
        "modified_at": datetime.fromtimestamp(started, UTC).isoformat(),
    }


def _details(backbone: Backbone) -> dict[str, Any]:
    family = str(backbone.config.model_type)
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": str(backbone.dtype).removeprefix("torch."),
    }


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
