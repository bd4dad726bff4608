"""What a request may say, in OpenAI's words; what cannot be honoured is refused by name, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

# OpenAI takes four; there is no reason to.
MOST_STOPS = 16
StopText = Annotated[str, Field(min_length=1, max_length=256)]
# What may be a text or a list is held against the form that it has; refusals leave out these names of the forms.
TEXT, LIST = "<text>", "<list>"


def form_of(value: Any) -> str:
    """Which of the two a value is."""
    return LIST if isinstance(value, list) else TEXT


class Strict(BaseModel):
    """Refuses fields that it does not know; null means left out, as clients send what they got."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Strict):
    """include_usage: send a last chunk with the usage and no choice."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Common(Strict):
    """What both kinds of request say: the rules of decoding, and parameters with the one value that is possible."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1_000_000, description="0 is no cut; not in OpenAI's API")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            Annotated[StopText, Tag(TEXT)] | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag(LIST)],
            Discriminator(form_of),
        ]
        | None
    ) = None
    user: str | None = Field(None, description="taken and not used")
    n: Literal[1] = 1
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def limiting(self) -> str | None:
        """The field by which the tokens of the answer were limited, if any."""
        return next((name for name in ("max_tokens", "max_completion_tokens") if name in self.model_fields_set), None)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(Strict):
    """A part of a message's content; texts alone are possible."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(LIST)], Discriminator(form_of)]
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class PlainFormat(Strict):
    """The one format of answers."""

    type: Literal["text"] = "text"


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: PlainFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
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
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """The body of /v1/completions: a text, or token ids, to continue."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), Tag(LIST)],
        Discriminator(form_of),
    ]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    suffix: Literal[""] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs
