"""llama.cpp's own completions: request bodies, their conversion to OpenAI's completions, and answers."""

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import AliasChoices, Discriminator, Field, Tag

from medusa_cli.model import Backbone
from medusa_cli.serve import neutral
from medusa_cli.serve.answer_fields import Sampling
from medusa_cli.serve.answer_format import AnswerFormat, sse
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.infill import File
from medusa_cli.serve.openai_format import stop_string_of
from medusa_cli.serve.scheduler import Event, Ticket
from medusa_cli.serve.schema import LIST, TEXT, Strict, TokenIds

# Field names of llama.cpp, by the equivalent fields of completions.
FIELDS = {"max_tokens": "n_predict", "suffix": "input_suffix"}
MAX_FILES = 1024
MAX_FIELDS = 128


class LlamaSampling(Sampling):
    """The fields that all of llama.cpp's completions share. The time limit t_max_predict_ms is ignored."""

    unserved = {
        name: check for name, check in neutral.REQUEST.items() if name != "t_max_predict_ms"
    }
    n_predict: int = Field(
        -1,
        ge=-1,
        validation_alias=AliasChoices("n_predict", "max_tokens"),
        description="0: only run the prompt, -1: up to the server's limit",
    )
    return_tokens: bool = False
    return_progress: bool = False
    response_fields: list[str] = Field([], max_length=MAX_FIELDS)

    def completion(self, prompt: str | list[int]) -> CompletionRequest:
        """Returns the equivalent completion."""
        shared = {*Sampling.model_fields, "return_progress"} & self.model_fields_set
        body = self.model_dump(include=shared, by_alias=True)
        return CompletionRequest(**body, prompt=prompt, max_tokens=self.n_predict or 1)


class LlamaRequest(LlamaSampling):
    """The body of /completion, with a text or token ids to continue."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag(TEXT)] | Annotated[TokenIds, Tag(LIST)],
        Discriminator(lambda value: LIST if isinstance(value, list) else TEXT),
    ]


class ExtraFile(Strict):
    """A part of another file."""

    place = "input_extra[]."
    filename: str = ""
    text: str


class InfillRequest(LlamaSampling):
    """The body of /infill. prompt: the text after input_prefix, such as the line up to the cursor."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES, fail_fast=True)] = []
    prompt: str = ""

    @property
    def prefix(self) -> str:
        return self.input_prefix + self.prompt

    @property
    def files(self) -> list[File]:
        return [File(file.filename, file.text) for file in self.input_extra]

    def room(self, context: int) -> int:
        """Returns the maximum number of tokens of the prompt."""
        quarter = context // 4
        return context - (quarter if self.n_predict < 0 else min(max(self.n_predict, 1), quarter))


class LlamaFormat(AnswerFormat):
    """Formats the answer to one request in llama.cpp's format."""

    def __init__(
        self, backbone: Backbone, body: LlamaSampling, model: str | None, ticket: Ticket
    ) -> None:
        super().__init__(ticket)
        self._backbone = backbone
        self._body = body
        self._model = model

    def whole(self) -> dict[str, Any]:
        return self._final(self._ticket.answer.text, self._ticket.answer.tokens)

    def read(self, event: Event) -> list[str]:
        lines = []
        if event.pieces or event.progress or not event.last:
            progress = {} if event.progress is None else {"prompt_progress": asdict(event.progress)}
            lines.append(sse({**self._chunk(event.text, event.tokens), **progress}))
        if event.last:
            lines.append(sse(self._final("", [])))
        return lines

    def _chunk(self, text: str, tokens: list[int], stop: bool = False) -> dict[str, Any]:
        shown = self._body.n_predict != 0
        return {
            "index": 0,
            "content": text if shown else "",
            "tokens": [*tokens] if self._body.return_tokens and shown else [],
            "stop": stop,
            "tokens_predicted": self._ticket.answer.stats.tokens if shown else 0,
            "tokens_evaluated": len(self._ticket.request.prompt),
        }

    def _final(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """Returns the last object of an answer, with only the fields that the request asks for."""
        ticket = self._ticket
        answer = ticket.answer
        word = None
        if answer.finish_reason == "stop":
            word = stop_string_of(self._backbone, answer, self._body.stop_strings)
        kind = "eos" if word is None else "word"
        body = {
            **self._chunk(text, tokens, stop=True),
            "model": self._model,
            "has_new_line": "\n" in answer.text,
            "truncated": False,
            "stop_type": kind if answer.finish_reason == "stop" else "limit",
            "stopping_word": word or "",
            "tokens_cached": len(ticket.request.prompt) + answer.stats.tokens,
            "timings": timings(ticket),
        }
        fields = self._body.response_fields
        if not fields:
            return body
        values = {field: _at(body, field) for field in fields}
        return {field: value for field, value in values.items() if value is not None}


def _at(body: Any, field: str) -> Any:
    """Returns the value at a path of names with slashes between them, or None."""
    for name in field.split("/"):
        body = body.get(name) if isinstance(body, dict) else None
    return body


def timings(ticket: Ticket) -> dict[str, float]:
    """Returns the numbers of tokens and the milliseconds of a prompt and its answer, under llama.cpp's names."""
    stats = ticket.answer.stats
    counts = {"prompt": len(ticket.request.prompt) - ticket.reused, "predicted": stats.tokens}
    seconds = {"prompt": stats.prefill_s, "predicted": stats.draft_s + stats.verify_s}
    figures: dict[str, float] = {"cache_n": ticket.reused}
    for part, count in counts.items():
        figures |= {
            f"{part}_n": count,
            f"{part}_ms": 1000 * seconds[part],
            f"{part}_per_token_ms": 1000 * seconds[part] / max(count, 1),
            f"{part}_per_second": count / seconds[part] if seconds[part] else 0.0,
        }
    return {**figures, "draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
