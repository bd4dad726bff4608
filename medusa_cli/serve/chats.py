"""The body of OpenAI's chats: messages, tools and variables of the chat template."""

import json
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, Discriminator, Field, Tag, field_validator, model_validator

from medusa_cli.serve import neutral
from medusa_cli.serve.answer_fields import ResponseFormat, Sampled, Source
from medusa_cli.serve.schema import (
    LIST,
    MAX_TOOLS,
    MAX_TOP,
    OBJECT,
    TEXT,
    Content,
    Form,
    JsonObject,
    Strict,
    TextPart,
    readable,
    text_of,
    type_of,
    without_types,
)


class Function(Strict):
    """A function that the model may call."""

    place = "tools[].function."
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments")


def functions_of(tools: Any) -> Any:
    """Returns the functions among tools; leaves out and notes tools that only their provider could run."""
    return without_types(
        tools, Tool.place, lambda kind: isinstance(kind, str) and kind != "function"
    )


class Tool(Strict):
    """A tool of the only supported type, a function."""

    place = "tools[]."
    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        function = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class CalledFunction(Strict):
    """A function that an answer called. If the end of the answer cut off the arguments, they are not valid JSON."""

    place = "messages[].tool_calls[].function."
    name: str
    arguments: Any = Field("", description="a text, or a JSON object")

    @field_validator("arguments")
    @classmethod
    def _text_or_object(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str | dict):
            raise ValueError("neither a text nor a JSON object")
        return arguments

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect; arguments that are not a JSON object stay text."""
        arguments = self.arguments
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                # Clients send an empty text for a call without arguments.
                value = json.loads(arguments or "{}")
                arguments = value if isinstance(value, dict) else arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Strict):
    """A call in an earlier answer."""

    place = "messages[].tool_calls[]."
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionName(Strict):
    place = "tool_choice.function."
    name: str


class NamedTool(Strict):
    """The value of `tool_choice` that names the tool to call."""

    place = "tool_choice."
    type: Literal["function"]
    function: FunctionName


def named_tool(name: str) -> dict[str, Any]:
    """Returns the value of `tool_choice` that names a tool."""
    return {"type": "function", "function": {"name": name}}


class ToolSubset(Strict):
    """The tools that an answer may call. With the mode "required", it must call one of them."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(Strict):
    """The value of `tool_choice` that allows only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


Subset = TypeVar("Subset")


def _form_of_choice(value: Any) -> str:
    if isinstance(value, str):
        return TEXT
    return LIST if type_of(value) == "allowed_tools" else OBJECT


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[Form, Tag(OBJECT)]
    | Annotated[Subset, Tag(LIST)],
    Discriminator(_form_of_choice),
]


class Message(Strict):
    """A turn of a conversation. refusal: replaces missing content. function_call: a call in OpenAI's old format."""

    place = "messages[]."
    unserved = {"reasoning": neutral.unless_given("reasoning_content")}
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content[TextPart] | None = None
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    name: str | None = None

    _readable = field_validator("content", mode="before")(readable)

    @model_validator(mode="after")
    def _agree(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("content is missing")
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise ValueError("tool_calls belong to the role assistant")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("the role tool needs tool_call_id")
        return self

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")

    @property
    def plain(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        text = text_of(self.content or self.refusal or "")
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "tool":
            name = {} if self.name is None else {"name": self.name}
            return {**message, "tool_call_id": self.tool_call_id or "", **name}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        calls = [(call.id, call.function.plain) for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append(("", self.function_call.plain))
        if calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": function} for id, function in calls
            ]
        return message


class TemplateOptions(Strict):
    """Variables of the chat template.

    thinking, reasoning: other ways to set enable_thinking and reasoning_effort.
    """

    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="more variables for the chat template"
    )
    enable_thinking: bool | None = Field(
        None, validation_alias=AliasChoices("enable_thinking", "think")
    )
    thinking: Any = None
    reasoning_effort: str | None = Field(None, pattern=r"^[\w-]{1,32}$")
    reasoning: Any = None

    @property
    def variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template that the request sets."""
        given = self.thinking
        thinking = given if isinstance(given, bool) else None
        if isinstance(given, dict):
            thinking = given.get("type") != "disabled"
        effort = self.reasoning_effort
        if effort is None and isinstance(self.reasoning, dict):
            asked = self.reasoning.get("effort")
            effort = asked if isinstance(asked, str) else None
        if effort == "none" and thinking is None:
            thinking = False
        if self.enable_thinking is not None:
            thinking = self.enable_thinking
        variables = {"enable_thinking": thinking, "reasoning_effort": effort}
        own = {name: value for name, value in variables.items() if value is not None}
        return {**own, **self.chat_template_kwargs}


class Conversation(TemplateOptions):
    """Messages, and the options for rendering them with the chat template."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool = Field(
        False, description="put the tokenizer's own before the prompt, too"
    )
    continue_final_message: bool = Field(
        False, description="the answer goes on with the last message"
    )
    add_generation_prompt: bool | None = Field(
        None, description="default: true unless the last message goes on"
    )

    _functions = field_validator("tools", mode="before")(functions_of)

    @model_validator(mode="after")
    def _one_way_on(self) -> "Conversation":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def template(self) -> dict[str, Any]:
        """Returns the arguments of the chat template."""
        new = self.add_generation_prompt
        if new is None:
            new = not self.continue_final_message
        ways = {"add_generation_prompt": new, "continue_final_message": self.continue_final_message}
        documents = {"documents": self.documents} if self.documents else {}
        return {**self.variables, **documents, **ways}

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Returns the tools that are described to the model."""
        return [tool.plain for tool in self.tools or ()]


class ChatRequest(Sampled, Conversation):
    """The body of /v1/chat/completions."""

    unserved = neutral.CHAT
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_tokens", "n_predict", "max_new_tokens")
    )
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    response_format: ResponseFormat = ResponseFormat()
    tool_choice: ToolChoice[NamedTool, AllowedTools] | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call; default: one if a call is required, else any"
    )

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; leave one of them out")
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice needs tools")
        for name in self._chosen:
            if name not in names:
                raise ValueError(f"tool_choice {name!r} is none of the tools")
        return self

    @property
    def _chosen(self) -> list[str]:
        """Returns the names of the tools that tool_choice lists."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return [choice.function.name] if isinstance(choice, NamedTool) else []

    @property
    def offered(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in super().offered if tool["function"]["name"] in self._chosen]
        return super().offered

    @property
    def offered_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.offered]

    @property
    def required(self) -> list[dict[str, Any]]:
        """Returns the tools of which the answer must call one; an empty list if no call is required."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.offered if tool["function"]["name"] in self._chosen]
        if isinstance(choice, AllowedTools):
            choice = choice.allowed_tools.mode
        return self.offered if choice == "required" else []

    @property
    def constraint(self) -> str:
        if self.required:
            return "tools"
        return super().constraint if self.response_format.type == "text" else "response_format"

    @property
    def forms(self) -> dict[str, Source]:
        source = self.response_format.source
        return {**({} if source is None else {"response_format": source}), **super().forms}

    @property
    def echoed(self) -> str:
        """Returns the text that is sent before the answer; it is empty without `echo`.

        With `echo`, it is the last message's text, if the assistant wrote it or if no generation prompt is added.
        """
        last = self.messages[-1]
        own = last.role == "assistant" or not self.template["add_generation_prompt"]
        return text_of(last.content or "") if self.echo and own else ""

    @property
    def limit(self) -> int | None:
        """Returns the maximum length of the answer in tokens."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """Returns how many of the likeliest tokens to report with each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
