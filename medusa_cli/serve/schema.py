"""Bodies of requests, in OpenAI's words. A field that has no effect here is refused by name, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

# OpenAI allows four.
MAX_STOPS = 16
# Fields with a single possible value: clients send them, and any other value is refused.
FIXED = {
    *("n", "best_of", "echo", "suffix", "store"),
    *("tools", "tool_calls", "tool_choice", "response_format", "annotations"),
}
# A field that may be a text or a list is checked in the form it was sent in; refusals leave out these names of forms.
TEXT, LIST = "<text>", "<list>"
FORM = Discriminator(lambda value: LIST if isinstance(value, list) else TEXT)
StopText = Annotated[str, Field(min_length=1, max_length=256)]
NoList = Annotated[list[Any], Field(max_length=0)]


class Strict(BaseModel):
    """Refuses unknown fields, and true as a number; null means left out, as clients send back what they received."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Strict):
    """include_usage: send a last chunk with the usage and no choice."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Common(Strict):
    """Fields of all requests: sampling, stop criteria, streaming."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1_000_000, description="0 is no cut; not in OpenAI's API")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            Annotated[StopText, Tag(TEXT)] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag(LIST)], FORM
        ]
        | None
    ) = None
    user: str | None = Field(None, description="taken and not used")
    n: Literal[1] = 1
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    # vLLM's; null is the model's own value.
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False

    @property
    def limit_field(self) -> str | None:
        """Returns the name of the field that limits the answer's tokens, if it was sent."""
        return next((name for name in ("max_tokens", "max_completion_tokens") if name in self.model_fields_set), None)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(Strict):
    """Part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """Turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(LIST)], FORM]
    tool_calls: NoList | None = None
    annotations: NoList | None = None

    @property
    def plain(self) -> dict[str, str]:
        """Returns the message in the form that chat templates take."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(Strict):
    type: Literal["text"] = "text"


class ChatRequest(Common):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: TextFormat | None = None
    tools: NoList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    store: Literal[False] = False

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; leave one of them out")
        return self

    @property
    def limit(self) -> int | None:
        """Returns the longest answer in tokens."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """Returns how many of the likeliest tokens to report beside each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def content(self) -> list[dict[str, str]]:
        """Returns the prompt as `Medusa.request` takes it."""
        return [message.plain for message in self.messages]


class CompletionRequest(Common):
    """Body of /v1/completions: a text, or token ids, to continue."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), Tag(LIST)],
        FORM,
    ]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    suffix: Literal[""] | None = None

    @property
    def limit(self) -> int:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def content(self) -> str | list[int]:
        return self.prompt
