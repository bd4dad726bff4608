"""What a bench and a distillation ask, and whom: options with what they come to."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError
from medusa_cli.runs.reading import Document

if TYPE_CHECKING:
    from medusa_cli.benchmarks import Question


@dataclass(frozen=True)
class Questions:
    """Which questions are asked, MT-Bench's where nothing else is said."""

    mt_bench: Annotated[
        bool, typer.Option("--mt-bench", help="The 80 two-turn MT-Bench questions; also what a bare bench takes.")
    ] = False
    questions: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|ID",
            help="Other questions: a file (.jsonl, .json, .parquet, .txt; FastChat's form, Spec-Bench, SPEED-Bench, "
            "HumanEval, GSM8K, or any prompts), or a hub dataset OWNER/NAME[:CONFIG[:SPLIT]].",
        ),
    ] = None
    category: Annotated[
        str | None, typer.Option(metavar="LIST", help="Questions of these categories alone, such as math,coding.")
    ] = None
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most N questions, spread over the categories. [default: all]")
    ] = None

    def __post_init__(self) -> None:
        if self.mt_bench and self.questions is not None:
            raise UsageError("--mt-bench and --questions exclude each other", "give one of them")

    @property
    def title(self) -> str:
        """What the set is called in reports."""
        if self.questions is None:
            return "MT-Bench"
        return Path(self.questions).name if Path(self.questions).is_file() else self.questions

    def chosen(self) -> "tuple[list[Question], int]":
        """The questions that are asked, and how many there are; UserError where the set cannot be read."""
        from medusa_cli.assets import mt_bench_path
        from medusa_cli.benchmarks.questions import of_categories, spread
        from medusa_cli.benchmarks.sets import read_questions

        source = mt_bench_path() if self.questions is None else self.questions
        found, skipped = read_questions(source)
        if skipped:
            console.warn(f"{source}: {skipped} records are no questions and were skipped")
        return spread(of_categories(found, self.category), self.limit), len(found)


@dataclass(frozen=True)
class Wanted:
    """What a distillation asks, and how it is answered; what is left out is the recipe's to say."""

    seed: options.Seed = None
    max_samples: options.MaxSamples = None
    max_new_tokens: options.MaxNewTokens = None
    max_turns: Annotated[
        int | None,
        typer.Option("--max-turns", "--turns", metavar="N", help="Turns answered in each conversation. [default: 2]"),
    ] = None
    temperature: options.Temperature = None
    random_seed: options.RandomSeed = None
    context: Annotated[
        int | None, typer.Option(help="Positions a conversation may fill; longer prompts are skipped. [default: 512]")
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Conversations that are decoded side by side. [default: as many as the memory holds, at most 64]",
            show_default=False,
        ),
    ] = None
    taps: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Keep states after these of the model's layers, too, such as 10,20: for `train drafter.taps=[10,20]`.",
        ),
    ] = None

    @property
    def settings(self) -> Document:
        """By the recipe's keys."""
        found = {f"distill.{key}": value for key, value in asdict(self).items()}
        return found if self.taps is None else found | {"distill.taps": f"[{self.taps}]"}


@dataclass(frozen=True)
class Servers:
    """Servers that answer in the model's place, and how many conversations they are asked at a time."""

    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL[,URL]",
            help="OpenAI-compatible servers of the model that answer instead of this machine (vLLM, SGLang, TGI, "
            "transformers serve). A key goes into the variable MEDUSA_API_KEY.",
        ),
    ] = None
    endpoint_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name on the servers. [default: found by asking]")
    ] = None
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="With --endpoint: conversations at a time.")] = 8

    def check(self, self_talk: bool, processes: int, taps: str | None = None) -> None:
        """UsageError for what servers cannot do."""
        if self.endpoint is not None and taps is not None:
            raise UsageError("--taps needs the model here: servers tell no states", "leave --taps or --endpoint out")
        if self.endpoint is not None and self_talk:
            raise UsageError("--self-talk needs the model here: servers write no user's turn", "leave --endpoint out")
        if self.endpoint is not None and processes > 1:
            raise UsageError("--endpoint needs one process", "start it without torchrun and raise --concurrency")

    def check_seed(self, seed: str) -> None:
        """UsageError for the model's own questions where servers have the model."""
        from medusa_cli.distilling.seeds import SELF

        if self.endpoint is not None and seed == SELF:
            raise UsageError(
                "--seed self needs the model here: servers write no user's turn",
                "leave --endpoint out, or give --seed a file of prompts",
            )
