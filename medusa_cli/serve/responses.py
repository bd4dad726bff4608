"""OpenAI's Responses API: request bodies, their conversion to chats, and answers as items, whole or in events."""

import json
import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from medusa_cli.errors import shown
from medusa_cli.serve import neutral
from medusa_cli.serve.answer_fields import Sampling
from medusa_cli.serve.answer_format import AnswerFormat, sse
from medusa_cli.serve.calls import CallReader, in_order
from medusa_cli.serve.chats import (
    ChatRequest,
    Function,
    TemplateOptions,
    ToolChoice,
    functions_of,
    named_tool,
)
from medusa_cli.serve.openai_format import speculative_figures
from medusa_cli.serve.refusals import Refusal
from medusa_cli.serve.scheduler import Event, Ticket
from medusa_cli.serve.schema import (
    FORM,
    ITEMS,
    LIST,
    MAX_TOOLS,
    TEXT,
    Content,
    NamedSchema,
    Strict,
    TextPart,
    check_json,
    readable,
    text_of,
    type_of,
)

# Field names of /v1/responses, by the equivalent fields of chats.
FIELDS = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}


class PastItem(Strict):
    """The fields that every past item may have."""

    place = "input[]."


class MessageItem(PastItem):
    """A turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content[TextPart]

    _readable = field_validator("content", mode="before")(readable)


class CallItem(PastItem):
    """A past call of a tool."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(PastItem):
    """The result of a past call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content[TextPart]


# Types of past items that the model does not read: items of tools that only their provider could run,
# and the thoughts of other models.
DROPPED = {
    *("reasoning", "compaction", "web_search_call", "file_search_call", "code_interpreter_call"),
    *("image_generation_call", "computer_call", "computer_call_output", "local_shell_call"),
    *("local_shell_call_output", "shell_call", "shell_call_output", "tool_search_call"),
    *("tool_search_output", "mcp_call", "mcp_list_tools", "mcp_approval_request"),
    "mcp_approval_response",
}


def _type_of(item: Any) -> str:
    return str(type_of(item) or "message")


def _served_items(items: Any) -> Any:
    """Returns the items that the model reads; raises ValueError for an item that is not served."""
    if not isinstance(items, list):
        return items
    served = []
    for index, item in enumerate(items):
        kind = _type_of(item)
        if kind == "item_reference":
            raise ValueError(
                f"item {index} refers to a stored item, and nothing is stored here; "
                "send store: false, so that your client sends whole items"
            )
        if kind in DROPPED:
            neutral.note([f"{PastItem.place}type={kind}"])
        elif f"<{kind}>" not in ITEMS:
            raise ValueError(
                f"item {index} has the type {shown(kind)}, which is not served; "
                "send messages, function_call and function_call_output items"
            )
        else:
            served.append(item)
    return served


def _functions_of(tools: Any) -> Any:
    """Returns the functions among tools, including the functions in namespaces."""
    if not isinstance(tools, list):
        return tools
    flat = []
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            inner = tool.get("tools")
            for function in inner if isinstance(inner, list) else ():
                if isinstance(function, dict):
                    flat.append({**function, "namespace": tool.get("name")})
        else:
            flat.append(tool)
    return functions_of(flat)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")],
    Discriminator(lambda value: f"<{_type_of(value)}>"),
]


class TextFormat(NamedSchema):
    """The form of the answer."""

    place = "text.format."
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Strict):
    place = "text."
    format: TextFormat = TextFormat()


class Typed(Strict):
    """The type of a tool, which is checked before the tool's other fields. Only functions are supported."""

    type: Literal["function"]


class FunctionTool(Function, Typed):
    """A function that the model may call. namespace: the group of tools that it belongs to, if any."""

    place = "tools[]."
    namespace: str | None = Field(None, exclude=True)


class ChosenTool(Typed):
    """The value of `tool_choice` that names the tool to call."""

    name: str


class AllowedTools(Strict):
    """The value of `tool_choice` that allows only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[ChosenTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ResponsesRequest(Sampling, TemplateOptions):
    """The body of /v1/responses, with the fields that have an equivalent in a chat. Nothing is stored."""

    unserved = neutral.RESPONSES
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)]
        | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag(LIST)],
        FORM,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions = TextOptions()
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice[ChosenTool, AllowedTools] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], AfterValidator(check_json)] | None = Field(
        None, description="comes back with the response"
    )

    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: drop the oldest items until the rest fits"
    )

    _items = field_validator("input", mode="before")(_served_items)
    _functions = field_validator("tools", mode="before")(_functions_of)

    @model_validator(mode="after")
    def _agree(self) -> "ResponsesRequest":
        if (self.text.format.type == "json_schema") != (self.text.format.schema_ is not None):
            raise ValueError("text.format: schema and the type json_schema belong together")
        return self

    def chat(self) -> ChatRequest:
        """Returns the equivalent chat request; raises ValidationError for an invalid combination of fields."""
        body = self.model_dump(include=SHARED & self.model_fields_set, by_alias=True)
        body |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        given = self.text.format
        if given.type == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif given.type == "json_schema":
            schema = {"name": given.name, "schema": given.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        functions = [tool.model_dump(exclude={"type"}) for tool in self.tools or ()]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        body["tool_choice"] = self.tool_choice
        choice = self.tool_choice
        if isinstance(choice, ChosenTool):
            body["tool_choice"] = named_tool(choice.name)
        elif isinstance(choice, AllowedTools):
            tools = [named_tool(tool.name) for tool in choice.tools]
            subset = {"mode": choice.mode, "tools": tools}
            body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": subset}
        return ChatRequest(**body, parallel_tool_calls=self.parallel_tool_calls)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": text_of(item.content)})
            elif isinstance(item, CallOutputItem):
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
                )
            else:
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages


# The fields that responses and chats share.
SHARED = {*Sampling.model_fields, *TemplateOptions.model_fields}


class ResponsesFormat(AnswerFormat):
    """Formats the answer to one request as items (messages and calls), and as the events that announce the items."""

    def __init__(self, body: ResponsesRequest, chat: ChatRequest, ticket: Ticket) -> None:
        super().__init__(ticket)
        self._body = body
        self._model = chat.model
        # Whether the answer may have several calls; by default, it may unless a call is required.
        self._several = not chat.required
        if body.parallel_tool_calls is not None:
            self._several = body.parallel_tool_calls
        self._calls = CallReader(chat.offered_names) if chat.offered else None
        self._namespaces = {
            tool.name: {"namespace": tool.namespace} for tool in body.tools or () if tool.namespace
        }
        self._id = _new_id("resp")
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item is unfinished
        self._sequence = 0

    def whole(self) -> dict[str, Any]:
        """Returns the finished response, after `read` has received all of its events."""
        return self._response(ended=True)

    def begin(self) -> list[str]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response()) for name in names]

    def read(self, event: Event) -> list[str]:
        """Adds an event's text to the items; returns the events of a stream."""
        events = self._add(event.text, event.last)
        if event.last:
            cut = self._ticket.answer.finish_reason == "length"
            name = "response.incomplete" if cut else "response.completed"
            events.append(self._event(name, response=self._response(ended=True)))
        return events

    def failed(self, reason: Refusal) -> str:
        error = {"code": "server_error", "message": str(reason)}
        response = {**self._response(), "status": "failed", "error": error}
        return self._event("response.failed", response=response)

    def _event(self, name: str, /, **fields: Any) -> str:
        self._sequence += 1
        return sse({"type": name, "sequence_number": self._sequence - 1, **fields}, name)

    def _add(self, text: str, last: bool) -> list[str]:
        """Adds text to the items; returns the events."""
        delta: dict[str, Any] = {"content": text} if text else {}
        if self._calls is not None:
            delta = self._calls.feed(text, last)
        events = []
        for kind, part in in_order(delta):
            if kind == "content":
                events += self._add_content(part)
            elif kind == "arguments":
                self._items[-1]["arguments"] += part
                name = "response.function_call_arguments.delta"
                events.append(self._event(name, **self._place(), delta=part))
            else:
                name = part["function"]["name"]
                call = {
                    "id": _new_id("fc"),
                    "type": "function_call",
                    "call_id": part["id"],
                    "name": name,
                    **self._namespaces.get(name, {}),
                }
                events += self._begin({**call, "arguments": ""})
        return events + (self._end(last) if last else [])

    def _add_content(self, text: str) -> list[str]:
        """Adds text to the open message, or to a new one; returns the events."""
        events = []
        if not self._open or self._items[-1]["type"] != "message":
            events = self._begin(
                {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": []}
            )
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            place = {**self._place(), "content_index": 0}
            events.append(self._event("response.content_part.added", **place, part=part))
            self._items[-1]["content"] = [dict(part)]
        self._items[-1]["content"][0]["text"] += text
        place = {**self._place(), "content_index": 0, "logprobs": []}
        return [*events, self._event("response.output_text.delta", **place, delta=text)]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, item: dict[str, Any]) -> list[str]:
        """Ends the open item, if any, and begins another; returns the events."""
        events = self._end()
        self._items.append({**item, "status": "in_progress"})
        self._open = True
        added = self._event(
            "response.output_item.added",
            output_index=len(self._items) - 1,
            item=dict(self._items[-1]),
        )
        return [*events, added]

    def _end(self, last: bool = False) -> list[str]:
        """Ends the open item, if any; returns the events. last: the answer ends, perhaps within the item."""
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        place = self._place()
        cut = last and self._ticket.answer.finish_reason == "length"
        if cut and item["type"] == "function_call":
            cut = not _is_json(item["arguments"])
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "message":
            [part] = item["content"]
            at = {**place, "content_index": 0}
            events = [
                self._event("response.output_text.done", **at, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", **at, part=part),
            ]
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        ended = self._event(
            "response.output_item.done", output_index=place["output_index"], item=dict(item)
        )
        return [*events, ended]

    def _response(self, ended: bool = False) -> dict[str, Any]:
        body = self._body
        stats = self._ticket.answer.stats
        answer = self._ticket.answer
        cut = ended and answer.finish_reason == "length"
        repeated = {"text", "tools", "tool_choice"}
        given = body.model_dump(include=repeated, by_alias=True, exclude_none=True)
        prompt = len(self._ticket.request.prompt)
        usage: dict[str, Any] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._ticket.reused, "cache_write_tokens": 0},
            "output_tokens": stats.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + stats.tokens,
        }
        if body.drafts.figures:
            usage["medusa"] = speculative_figures([self._ticket], by_position=True)
        status = "in_progress"
        if ended:
            status = "incomplete" if cut else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items if ended else [],
            "parallel_tool_calls": self._several,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": usage if ended else None,
            "tools": [],
            "tool_choice": "auto",
            **given,
        }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
