"""The bodies of requests to tokenize and detokenize, with the field names of vLLM and llama.cpp."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from medusa_cli.serve import neutral
from medusa_cli.serve.chats import Conversation
from medusa_cli.serve.schema import LIST, TEXT, Strict, TokenId


class TokenizeText(Strict):
    """The body of /tokenize for a text, with the field names of vLLM (prompt) or llama.cpp (content)."""

    unserved = {"parse_special": neutral.only(True)}
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeText":
        if (self.prompt is None) == (self.content is None):
            raise ValueError("give prompt or content, the text to tokenize")
        return self

    @property
    def text(self) -> str:
        return (self.prompt if self.content is None else self.content) or ""

    @property
    def begins(self) -> bool:
        """Returns True if the tokenizer's own special tokens come first."""
        return self.add_special_tokens if self.content is None else self.add_special


class TokenizeChat(Conversation):
    """The body of /tokenize for messages."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    @property
    def prompts(self) -> Sequence[list[int]]:
        return [self.tokens]


def _form_of_tokenize(body: Any) -> str:
    is_chat = isinstance(body, TokenizeChat) or (isinstance(body, dict) and "messages" in body)
    return LIST if is_chat else TEXT


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag(TEXT)] | Annotated[TokenizeChat, Tag(LIST)],
    Discriminator(_form_of_tokenize),
]
