"""The body of OpenAI's completions."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator

from medusa_cli.serve.answer_fields import Sampled
from medusa_cli.serve.schema import LIST, LISTS, MAX_CHOICES, MAX_TOP, TEXT, TEXTS, TokenIds


def _form_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return TEXT
    first = value[0] if value else None
    if isinstance(first, str):
        return TEXTS
    return LISTS if isinstance(first, list) else LIST


class CompletionRequest(Sampled):
    """The body of /v1/completions, with texts or lists of token ids to continue."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)]
        | Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
            Tag(TEXTS),
        ]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES), Tag(LISTS)]
        | Annotated[TokenIds, Tag(LIST)],
        Discriminator(_form_of_prompt),
    ]
    max_tokens: int = Field(
        16,
        ge=-1,
        validation_alias=AliasChoices("max_tokens", "n_predict", "max_new_tokens"),
        description="0 only with echo, -1: up to the server's limit",
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    suffix: str = Field("", description="text after the answer, for models that fill in the middle")
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _agree(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo to be true")
        if self.suffix and (
            self.echo or not all(isinstance(prompt, str) for prompt in self.prompts)
        ):
            raise ValueError("suffix needs a text as the prompt, and no echo")
        return self

    @property
    def limit(self) -> int | None:
        return None if self.max_tokens < 0 else self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
