"""The options that several commands share, with their flags, units and help texts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from medusa_cli import console
from medusa_cli.errors import UsageError, in_flags
from medusa_cli.files import fetch
from medusa_cli.files.catalogue import DEFAULT_MODEL, DEFAULT_SEED
from medusa_cli.files.model_files import check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import COLDEST
from medusa_cli.runs.recipe_files import template_text
from medusa_cli.runs.resolve import Choice, NoDrafter, choose
from medusa_cli.runs.run import DEFAULT_RUN

if TYPE_CHECKING:
    from medusa_cli.bench.questions import Question
    from medusa_cli.decode import Sampling
    from medusa_cli.decode.grammar import Grammar
    from medusa_cli.loading import LoadedModel


def flag(usage: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Returns a typer option for a usage such as "--run NAME": its flags and, if it takes a value, its metavar.

    typer adds the default only with show_default=True, because most help texts state it.
    """
    flags = [word for word in usage.split() if word.startswith("-")]
    metavar = next((word for word in usage.split() if not word.startswith("-")), None)
    return typer.Option(
        *flags, metavar=metavar, help=help, rich_help_panel=panel, **{"show_default": False, **more}
    )


_drafting = partial(flag, panel="Drafting")
_sampling = partial(flag, panel="Sampling")
_grammar = partial(flag, panel="Form of the answer")
_loading = partial(flag, panel="Loading")
_output = partial(flag, panel="Output")


def refuse(flags: Mapping[str, Any], reason: str, remedy: str = "leave one of them out") -> None:
    """Raises UsageError for the first of these flags that is given; the message is flag, value and reason."""
    for name, value in flags.items():
        if value is None or value is False:
            continue
        given = name if value is True else f"{name} {value}"
        raise UsageError(f"{given} {reason}", remedy)


def check_temperature(value: float | None) -> float | None:
    if value is not None and not (value == 0 or (math.isfinite(value) and value >= COLDEST)):
        raise typer.BadParameter(f"{value} is not valid; use 0 for greedy, or {COLDEST:g} and more")
    return value


def check_beside_picture(output: Path | None) -> None:
    """Raises UsageError for an --output that ends in .png, because the command's picture would replace this file."""
    if output is not None and output.suffix == ".png":
        fault = f"--output {output} would be replaced by the picture of the same name"
        raise UsageError(fault, "end it in .json")


def check_model(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty; give a model, or leave it out")
    return value


def model_flag(default: str) -> Any:
    return flag("--model NAME|FOLDER|ID", f"{_MODEL} [default: {default}]", callback=check_model)


_RUN = "Run directory: NAME means runs/NAME; a value with a / is the path of a folder."
_MODEL = (
    "A name as for `medusa assets`, a folder (of a model or a LoRA adapter), a GGUF file, a Hugging Face id, or "
    "ORG/NAME:Q4_K_M for the Q4_K_M GGUF file of a hub repository."
)
_DRAFTER = (
    "A saved drafter: a run, a folder, a hub id, or a checkpoint that `medusa import` reads. mtp: the MTP layer in the "
    "model's own checkpoint. [default: the run's drafter/, else the drafter that ships for the model]"
)
_SEED = (
    "Prompts: sharegpt, sharegpt-long, sharegpt-code, ultrachat (from the hub), code (from the Python sources "
    "installed here), a JSON/JSONL file of conversations, or a hub dataset's id."
)
_TREE = (
    "auto: in each step, the size that is fastest for this text on this machine, or no drafts. static: the run's "
    "tree.json; static:N: the best tree of N nodes according to the calibration. dynamic: a new tree for every step, "
    "with N nodes or as many as in tree.json. FILE: a tree from `medusa tree`, or a medusa_choices list. "
    "[default: auto]"
)
_LOOKUP = (
    "Also draft n-gram matches in the text; without a drafter, draft only these matches. "
    "[default: --lookup with --tree auto; in chat and serve also without a drafter]"
)
_DTYPE = (
    "Number type of the weights: auto (as in the files), bf16, fp16, or fp32 "
    "(which also keeps activations in fp32)."
)
_ENGINE = (
    "native: compiled C++ (CPU). torch: fused layers (GPU). eager: transformers' layers. auto: the first of these that "
    "supports the model on the device."
)
_ACTIVATIONS = (
    "Number type of activations for matmuls with quantized weights: int8 (rounded in groups of 32, as llama.cpp "
    "does), fp32 (on a GPU: as --dtype), or auto (int8, but fp32 with --dtype fp32)."
)
_KV = (
    "Number type of keys and values in the cache (native engine): fp32, fp16 (half the memory), or q8_0 (8 bits in "
    "groups of 32, 0.27 times the memory of fp32)."
)
_EXACT = (
    "On a GPU, use kernels that give a row the same bits in every pass, so that no draft changes a greedy answer. "
    "The speed of these kernels was never measured."
)
_QUANTIZE = (
    "Quantize the model's weights, which changes its answers: int8 or int4 (native and torch engine), bnb.int8 or "
    "bnb.nf4 (bitsandbytes), or none. [default: as in the training of the drafter]"
)
_TEMPERATURE = (
    "Sampling temperature; 0 is greedy. [default: 0, or 0.7 with --sampling exact or typical]"
)
_TOKENS = "Maximum length of an answer, in tokens. [default: 512 in chat, 256 in distill and bench, 96 in demo]"
_SAMPLING = (
    "greedy, exact (the model's own distribution) or typical (Medusa's looser acceptance). [default: greedy, or exact "
    "with a --temperature]"
)
_TOP_P = "Sample only from the likeliest tokens, whose probabilities add up to P."
_TOP_K = "Sample only from the N likeliest tokens; 0: from all tokens."
_JUDGE = (
    "Let a model on an OpenAI-compatible server grade the answers, and compare each answer with that of plain "
    "decoding, in both orders. The server gets the key in MEDUSA_API_KEY."
)
_QUESTIONS = (
    "Other questions: a file (.jsonl, .json, .parquet or .txt) in the format of FastChat, Spec-Bench, SPEED-Bench, "
    "HumanEval or GSM8K, or with any prompts; or a hub dataset OWNER/NAME[:CONFIG[:SPLIT]]."
)

Text = str | None
# torchrun mistakes "--run" for an abbreviation of its own "--run-path" and rejects it, so the
# option has a second name.
Run = Annotated[str, flag("--run --run-dir NAME", _RUN, show_default=True)]
RunOrShipped = Annotated[
    Text, flag("--run NAME", f"{_RUN} [default: the drafter that ships for the model]")
]
RunOrDefault = Annotated[
    Text, flag("--run NAME", f"{_RUN} [default: {DEFAULT_RUN}, else the drafter that ships]")
]
RunOrNew = Annotated[Text, flag("--run NAME", "The run to write. [default: named after PATH|ID]")]
Model = Annotated[Text, model_flag(f"the run's or the drafter's, else {DEFAULT_MODEL}")]
ModelOfDrafter = Annotated[Text, model_flag("the model that the drafter's config names")]
Drafter = Annotated[Text, flag("--drafter NAME|FOLDER|ID|mtp", _DRAFTER)]
TrustRemoteCode = Annotated[
    bool, _loading("--trust-remote-code", "Run the Python files that come with the model.")
]
ChatTemplate = Annotated[
    Path | None,
    flag("--chat-template FILE", "Jinja template in place of the model's own.", dir_okay=False),
]
Seed = Annotated[Text, flag("--seed NAME|FILE|ID", f"{_SEED} [default: {DEFAULT_SEED}]")]
RandomSeed = Annotated[
    int | None,
    _sampling("--random-seed N", "Seed of the random generator. [default: 0]", min=0, max=2**62),
]
MaxSamples = Annotated[
    int | None,
    flag(
        "--max-samples N",
        "Use at most N conversations. [default: all; 800 in distill without a recipe]",
        min=1,
    ),
]
MaxNewTokens = Annotated[int | None, _sampling("--max-new-tokens N", _TOKENS, min=1)]
Temperature = Annotated[
    float | None, _sampling("--temperature T", _TEMPERATURE, callback=check_temperature)
]
BatchSize = Annotated[
    int, flag("--batch-size N", "Conversations decoded together.", show_default=True, min=1)
]
Baseline = Annotated[bool, flag("--baseline", "Decode plainly, one token per step.")]
Quiet = Annotated[bool, _output("--quiet", "Print results, warnings and errors only.")]
Debug = Annotated[bool, _output("--debug", "Print the traceback of an error.")]
Judge = Annotated[Text, flag("--judge URL", _JUDGE)]
JudgeModel = Annotated[Text, flag("--judge-model NAME", "The name of the model that judges.")]


@dataclass(frozen=True)
class LoadFlags(LoadOptions):
    """Holds the flags for loading a model. quantize: None means the quantization of the drafter's training."""

    device: Annotated[
        str, _loading("--device NAME", "auto, cpu, cuda[:N] or mps.", show_default=True)
    ] = "auto"
    dtype: Annotated[str, _loading("--dtype TYPE", _DTYPE, show_default=True)] = "auto"
    engine: Annotated[str, _loading("--engine NAME", _ENGINE, show_default=True)] = "auto"
    quantize: Annotated[Text, _loading("--quantize METHOD", _QUANTIZE)] = None
    trust_remote_code: TrustRemoteCode = False
    activations: Annotated[str, _loading("--activations TYPE", _ACTIVATIONS, show_default=True)] = (
        "auto"
    )
    kv: Annotated[str, _loading("--kv TYPE", _KV, show_default=True)] = "fp32"
    exact: Annotated[bool, _loading("--exact", _EXACT)] = False

    @property
    def given(self) -> list[str]:
        """Returns the flags whose values are not the defaults."""
        names = [own.name for own in fields(self) if getattr(self, own.name) != own.default]
        return [f"--{name.replace('_', '-')}" for name in names]

    def of(self, model: str) -> str:
        """Returns a model's name for messages, with a note if the model's own code is trusted."""
        trusted = ", its own code trusted (--trust-remote-code)" if self.trust_remote_code else ""
        return model + trusted


@dataclass(frozen=True)
class DraftFlags:
    """Holds the flags for the model, its drafter and the draft policy."""

    run: RunOrShipped = None
    model: Model = None
    drafter: Drafter = None
    tree: Annotated[Text, _drafting("--tree auto|static[:N]|dynamic[:N]|FILE", _TREE)] = None
    lookup: Annotated[bool | None, _drafting("--lookup/--no-lookup", _LOOKUP)] = None

    def choose(self, need_drafter: bool = True) -> Choice:
        """Returns the model and files to use; raises UserError if a file is missing or the model is not supported."""
        model = None if self.model is None else ModelSource.of(self.model)
        choice = choose(
            model, self.run, self.drafter, self.tree, need_drafter=need_drafter, lookup=self.lookup
        )
        check_model_files(choice.source)
        return choice

    def or_plain(self, baseline: bool, chat_template: Path | None = None) -> Choice:
        """Returns what `choose` returns (with `baseline`, without a drafter), together with the given chat template.

        For a model without a drafter, n-gram matches are drafted, unless --no-lookup or --tree is given. Raises
        UsageError for --baseline with --lookup or --tree.
        """
        if baseline:
            given = {"--lookup": self.lookup, "--tree": self.tree}
            refuse(given, "has no effect with --baseline")
        template = None if chat_template is None else template_text(str(chat_template))
        try:
            choice = self.choose(need_drafter=not baseline)
        except NoDrafter as reason:
            if self.lookup is False or self.tree is not None:
                raise
            choice = replace(reason.plain, lookup=True)
            check_model_files(choice.source)
            remedy = in_flags(reason.remedy)
            console.info(f"{reason.message}: drafting n-grams of the text; {remedy}")
        return choice if template is None else replace(choice, chat_template=template)


@dataclass(frozen=True)
class SamplingFlags:
    """Holds the flags for sampling and for the answer's length."""

    max_new_tokens: MaxNewTokens = None
    temperature: Temperature = None
    sampling: Annotated[Text, _sampling("--sampling MODE", _SAMPLING)] = None
    top_p: Annotated[float, _sampling("--top-p P", _TOP_P, show_default=True)] = 1.0
    top_k: Annotated[int, _sampling("--top-k N", _TOP_K, show_default=True)] = 0
    random_seed: RandomSeed = None

    def __post_init__(self) -> None:
        """Raises UsageError for values that are not valid together, or that have no effect."""
        given = (self.temperature, self.sampling) != (None, None) or self.top_p != 1 or self.top_k
        if not given:
            return
        self.sampled  # noqa: B018  (it raises)
        if self.temperature != 0:
            return
        from medusa_cli.decode.sampling_options import cuts

        mode = None if self.sampling == "greedy" else self.sampling
        without: dict[str, Any] = {**cuts(self.top_p, self.top_k, None), "@sampling": mode}
        refuse(without, "has no effect with @temperature 0, which is greedy")

    @property
    def sampled(self) -> "Sampling":
        """Returns the sampling parameters; raises UsageError for values that are not valid together."""
        from medusa_cli.decode.sampling_options import sampling_of

        return sampling_of(
            self.sampling, self.temperature, self.top_p, self.top_k, self.random_seed
        )


@dataclass(frozen=True)
class GrammarFlags:
    """Holds the flags for the grammar that an answer must follow."""

    json_schema: Annotated[
        Path | None,
        _grammar("--json-schema FILE", "Make the answer JSON that follows the schema in FILE."),
    ] = None
    regex: Annotated[
        Text, _grammar("--regex TEXT", "Make the answer match a regular expression.")
    ] = None
    grammar_file: Annotated[
        Path | None,
        _grammar(
            "--grammar FILE",
            "Make the answer follow the grammar in FILE (in the format of Lark or llama.cpp's GBNF).",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises UserError for a grammar that cannot be read or followed."""
        if (grammar := self.grammar) is not None:
            from medusa_cli.decode.grammar import check_syntax

            check_syntax(grammar)

    @property
    def grammar(self) -> "Grammar | None":
        """Returns the grammar; raises UserError for a file that cannot be read, UsageError for several grammars."""
        if self.json_schema is self.regex is self.grammar_file is None:
            return None
        from medusa_cli.files.io import read_text

        schema = self.json_schema and read_text(self.json_schema, "@json_schema")
        grammar = self.grammar_file and read_text(self.grammar_file, "@grammar")
        from medusa_cli.decode.grammar import Grammar

        return Grammar.of(json_schema=schema, regex=self.regex, grammar=grammar)


@dataclass(frozen=True)
class OutputFlags:
    """Holds the flags for the command's output."""

    json: Annotated[
        bool, _output("--json", "Print one JSON document on stdout instead of text.")
    ] = False
    quiet: Quiet = False
    debug: Debug = False

    def configure(self, first: bool = True) -> None:
        """Configures the console; if there are several processes, only the `first` process prints."""
        console.configure(quiet=self.quiet or not first, json=self.json or not first)
        fetch.progress = console.fetching


@dataclass(frozen=True)
class QuestionFlags:
    """Holds the flags for the questions to ask; the default is MT-Bench."""

    mt_bench: Annotated[
        bool, flag("--mt-bench", "The 80 MT-Bench questions, with two turns each. [default]")
    ] = False
    coding: Annotated[
        bool,
        flag(
            "--coding",
            "40 questions about code that come with this program, with two turns each.",
        ),
    ] = False
    questions: Annotated[Text, flag("--questions FILE|ID", _QUESTIONS)] = None
    agent: Annotated[
        bool,
        flag(
            "--agent",
            "5 conversations with a coding agent. Each has 6 turns, and each turn adds about 2,000 tokens of source "
            "code from Python's standard library. The methods keep the earlier turns in a prefix cache.",
        ),
    ] = False
    category: Annotated[
        Text,
        flag("--category LIST", "Ask only questions of these categories, such as math,coding."),
    ] = None
    limit: Annotated[
        int | None,
        flag(
            "--limit N",
            "Ask at most N questions, spread over the categories. [default: all]",
            min=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        sets = {
            "--mt-bench": self.mt_bench,
            "--coding": self.coding,
            "--agent": self.agent,
            "--questions": self.questions is not None,
        }
        given = [name for name, value in sets.items() if value]
        if len(given) > 1:
            raise UsageError(f"{given[0]} and {given[1]} exclude each other", "give one of them")
        if self.category is not None and given in ([], ["--mt-bench"]):
            from medusa_cli.bench.questions import MT_BENCH, checked_categories

            checked_categories(self.category, MT_BENCH)

    @property
    def title(self) -> str:
        """Returns the name of the question set for reports."""
        if self.questions is None:
            return "coding" if self.coding else "agent" if self.agent else "MT-Bench"
        return Path(self.questions).name if Path(self.questions).is_file() else self.questions

    def chosen(self) -> "tuple[list[Question], int]":
        """Returns the questions to ask, and how many the whole set has; raises UserError for an unreadable set."""
        from medusa_cli.bench.questions import (
            CODING,
            agent_questions,
            of_categories,
            read_questions,
            spread,
        )
        from medusa_cli.files.fetch import mt_bench_path

        if self.agent:
            questions = agent_questions()
        else:
            source = CODING if self.coding else self.questions or mt_bench_path()
            questions, skipped = read_questions(source)
            if skipped:
                console.warn(f"{source}: {skipped} records are not questions and were skipped")
        return spread(of_categories(questions, self.category), self.limit), len(questions)


def spread_out(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command in the form that typer accepts: each dataclass parameter is replaced by its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name not in groups:
            keyword = parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
            parameters.append(keyword)
            continue
        kinds = get_type_hints(hints[name], include_extras=True)
        for field in fields(hints[name]):
            keyword = Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=kinds[field.name],
            )
            parameters.append(keyword)

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__module__ = command.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def load(choice: Choice, loading: LoadFlags, *, chat: bool = False) -> "LoadedModel":
    """Loads the chosen model and drafter, with a progress bar while steps are timed. chat: requires a chat template."""
    from medusa_cli.loading import load_model

    with console.bars() as show:
        loaded = load_model(choice, loading, chat=chat, show=show)
    console.info(loading.of(loaded.description))
    return loaded
