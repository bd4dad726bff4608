"""The words every command shares: one meaning, unit and help text each; the default is the command's."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL, DEFAULT_SEED
from medusa_cli.errors import UsageError
from medusa_cli.runs.recipe import COLDEST
from medusa_cli.runs.resolve import Choice, LoadOptions
from medusa_cli.runs.run import DEFAULT_RUN, rounding_in

if TYPE_CHECKING:
    from medusa_cli.api import LoadedModel
    from medusa_cli.bench.questions import Question
    from medusa_cli.decode import Sampling

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "bf16", "fp16", "fp32")
ENGINES = ("auto", "eager", "fast", "int8", "int4")


def _option(flag: str, metavar: str | None, help: str, default: bool = False, **more: Any) -> Any:
    """An option of its own name; default: whether the help adds what the default is, where the text does not say it."""
    return typer.Option(*flag.split(), metavar=metavar, help=help, show_default=default, **more)


def _among(words: tuple[str, ...], *, numbered: str = "") -> Callable[[str], str]:
    """Refuses what is none of the words; the one that is `numbered` may have :N behind it."""

    def check(value: str) -> str:
        word, _, index = value.partition(":")
        if word not in words or (":" in value and not (index.isdigit() and word == numbered)):
            more = f", {numbered}:N" if numbered else ""
            raise typer.BadParameter(f"{value!r} is none of {', '.join(words)}{more}")
        return value

    return check


def check_temperature(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"{value} is not a number of 0 or more; 0 is greedy")
    if value is not None and 0 < value < COLDEST:
        raise typer.BadParameter(f"{value} is too close to 0; 0 is greedy")
    return value


_NAMES = "NAME|FOLDER|ID"
Model = Annotated[
    str | None,
    _option(
        "--model",
        _NAMES,
        f"The backbone: a named model, a folder, or a Hugging Face id. [default: the run's, else {DEFAULT_MODEL}]",
    ),
]
_RUN = "The run directory: NAME means runs/NAME, anything with a / is a folder."
# torchrun takes "--run" for a beginning of its own "--run-path" and refuses it: hence the second name.
Run = Annotated[str, _option("--run --run-dir", "NAME", _RUN, default=True)]
# For the commands that fall back to the drafter that ships when no run is named.
RunOrShipped = Annotated[str | None, _option("--run", "NAME", f"{_RUN} [default: what ships for the model]")]
# For `tree`, which takes the default run where there is one.
RunOrDefault = Annotated[str | None, _option("--run", "NAME", f"{_RUN} [default: {DEFAULT_RUN}, else what ships]")]
# For `import`: the run and the model of a checkpoint.
RunOrNew = Annotated[str | None, _option("--run", "NAME", "The run to write. [default: named after PATH|ID]")]
ModelOrSaid = Annotated[
    str | None,
    _option("--model", _NAMES, "The backbone that the drafter is for. [default: the one that its config names]"),
]
Drafter = Annotated[
    Path | None,
    _option(
        "--drafter", "FOLDER", "A saved drafter. [default: the run's drafter/, else the one that ships for the model]"
    ),
]
Tree = Annotated[
    str | None,
    _option(
        "--tree",
        "auto|static[:N]|dynamic[:N]|FILE",
        "auto: of a size that pays on this machine and goes with the text, down to no drafts; static: the run's "
        "tree.json, or the best one of N nodes by the calibration; dynamic: a tree grown for every step, of as many "
        "nodes or N; or a file from `medusa tree` or medusa_choices list. [default: auto]",
    ),
]
Lookup = Annotated[
    bool | None,
    typer.Option(
        "--lookup/--no-lookup",
        help="Draft what followed the same words earlier in the text, too, as far as that pays; without a drafter, "
        "that alone. [default: with --tree auto]",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    _option(
        "--device",
        "NAME",
        "Where the backbone runs: auto, cpu, cuda[:N], mps.",
        default=True,
        callback=_among(DEVICES, numbered="cuda"),
    ),
]
Dtype = Annotated[
    str,
    _option(
        "--dtype",
        "TYPE",
        "Number type that is computed in: auto (the fastest that is true to the checkpoint), bf16, fp16, fp32.",
        default=True,
        callback=_among(DTYPES),
    ),
]
Engine = Annotated[
    str,
    _option(
        "--engine",
        "NAME",
        "How the backbone runs: fast (lean layers over packed weights), eager (transformers' own), auto (fast "
        "where it knows the model), or int8 or int4: fast over weights rounded to so many bits, which changes the "
        "model (CPU).",
        default=True,
        callback=_among(ENGINES),
    ),
]
_ROUNDED = "[default: as the drafter was trained, else whole]"
LoadIn4bit = Annotated[
    bool | None,
    _option(
        "--load-in-4bit/--no-load-in-4bit",
        None,
        f"Load the backbone's weights in 4 bits (bitsandbytes NF4). {_ROUNDED}",
    ),
]
LoadIn8bit = Annotated[
    bool | None,
    _option(
        "--load-in-8bit/--no-load-in-8bit", None, f"Load the backbone's weights in 8 bits (bitsandbytes). {_ROUNDED}"
    ),
]
_TRUST = "Run the Python files that come with the model; without it none ever is."
TrustRemoteCode = Annotated[bool, _option("--trust-remote-code", None, _TRUST)]
Seed = Annotated[
    str | None,
    _option(
        "--seed",
        "NAME|FILE|ID",
        f"The prompts: sharegpt, a JSON/JSONL file of conversations, or a hub dataset's id. [default: {DEFAULT_SEED}]",
    ),
]
RandomSeed = Annotated[
    int | None, _option("--random-seed", "N", "Seed of the random generator. [default: 0]", min=0, max=2**62)
]
MaxSamples = Annotated[
    int | None,
    _option(
        "--max-samples",
        "N",
        "At most this many conversations. [default: all there are, or what the command's first line says]",
        min=1,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    _option(
        "--max-new-tokens",
        "N",
        "Longest answer, in tokens. [default: 512 in chat, 256 in distill and bench, 128 in demo]",
        min=1,
    ),
]
Temperature = Annotated[
    float | None,
    _option(
        "--temperature",
        "T",
        "Sampling temperature; 0 is greedy. [default: 0, or 0.7 with --sampling exact or typical]",
        callback=check_temperature,
    ),
]
BatchSize = Annotated[
    int, _option("--batch-size", "N", "Conversations that are decoded side by side.", default=True, min=1)
]
Json = Annotated[bool, _option("--json", None, "Print one JSON document on stdout instead of text.")]
Quiet = Annotated[bool, _option("--quiet", None, "Print results and errors only.")]
Debug = Annotated[bool, _option("--debug", None, "Show the traceback when something fails.")]
Judge = Annotated[
    str | None,
    _option(
        "--judge",
        "URL",
        "Let a model behind an OpenAI-compatible server grade the answers, and compare them in pairs, both "
        "orders. A key in MEDUSA_API_KEY goes along.",
    ),
]
JudgeModel = Annotated[str | None, _option("--judge-model", "NAME", "The model that judges.")]
SamplingMode = Annotated[
    str | None,
    _option(
        "--sampling",
        "MODE",
        "greedy, exact (the model's own distribution) or typical (the paper's looser acceptance). "
        "[default: greedy, or exact with a --temperature]",
    ),
]
TopP = Annotated[float, _option("--top-p", "P", "Nucleus: sample from the top mass P; 1 is all of it.", default=True)]
TopK = Annotated[int, _option("--top-k", "N", "Sample from the N likeliest tokens; 0 is all.", default=True)]


@dataclass(frozen=True)
class LoadFlags:
    """Where a backbone runs, in which numbers, and how it is loaded."""

    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    engine: options.Engine = "auto"
    load_in_4bit: options.LoadIn4bit = None
    load_in_8bit: options.LoadIn8bit = None
    trust_remote_code: options.TrustRemoteCode = False

    def of(self, model: str) -> str:
        """A model's name for a greeting line, which says where its own code is let run."""
        return f"{model}, its own code trusted (--trust-remote-code)" if self.trust_remote_code else model

    @property
    def loading(self) -> LoadOptions:
        """Returns the options of loading; weights are quantised only on request."""
        return LoadOptions(
            self.device,
            self.dtype,
            self.engine,
            bool(self.load_in_4bit),
            bool(self.load_in_8bit),
            self.trust_remote_code,
        )

    @property
    def rounding(self) -> str | None:
        """How the model's weights are rounded, where that was asked for: "4bit", "8bit", "int8" or "int4"."""
        from medusa_cli.engine.kernels import BITS

        ways = {"4bit": self.load_in_4bit, "8bit": self.load_in_8bit, self.engine: self.engine in BITS}
        return next((way for way, asked in ways.items() if asked), None)


@dataclass(frozen=True)
class DraftFlags:
    """Which model decodes, what drafts for it, and over which trees."""

    run: options.RunOrShipped = None
    model: options.Model = None
    drafter: options.Drafter = None
    tree: options.Tree = None
    lookup: options.Lookup = None

    def or_plain(self, baseline: bool) -> "Choice":
        """The files, or those of plain decoding with --baseline; UsageError where both that and lookups are asked."""
        from medusa_cli.errors import UsageError

        if baseline and self.lookup:
            raise UsageError("--baseline and --lookup exclude each other", "leave one of them out")
        return self.choose(need_drafter=not baseline)

    def choose(self, need_drafter: bool = True) -> "Choice":
        """The files that belong together; UserError where nothing is to be had."""
        from medusa_cli.runs.resolve import choose

        return choose(self.model, self.run, self.drafter, self.tree, need_drafter=need_drafter, lookup=self.lookup)


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen, and how many at most."""

    max_new_tokens: options.MaxNewTokens = None
    sampling: options.SamplingMode = None
    temperature: options.Temperature = None
    top_p: options.TopP = 1.0
    top_k: options.TopK = 0
    random_seed: options.RandomSeed = None

    @property
    def sampled(self) -> "Sampling":
        """The rule by which tokens are chosen; UsageError where there is none such."""
        from medusa_cli.decode.sampling import sampling_of

        return sampling_of(self.sampling, self.temperature, self.top_p, self.top_k, self.random_seed)


@dataclass(frozen=True)
class OutputFlags:
    """What a command says, and how."""

    json: options.Json = False
    quiet: options.Quiet = False
    debug: options.Debug = False

    def configure(self, first: bool = True) -> None:
        """Let the console speak so; of several processes, the first one alone."""
        console.configure(quiet=self.quiet or not first, json=self.json or not first)


def but(*names: str) -> frozenset[str]:
    """Fields of such a dataclass that a command does not offer: Annotated[Where, but("engine")]."""
    return frozenset(names)


def spread_out(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: each parameter that is a dataclass gives way to the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        kind, *more = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        left_out = frozenset[str]().union(*(one for one in more if isinstance(one, frozenset)))
        offered = [one for one in fields(kind) if one.name not in left_out]
        groups[name], types = (kind, [one.name for one in offered]), get_type_hints(kind, include_extras=True)
        parameters += [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
            for one in offered
        ]

    def run(**given: object) -> None:
        made = {name: kind(**{one: given.pop(one) for one in names}) for name, (kind, names) in groups.items()}
        command(**given, **made)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class QuestionFlags:
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
        from medusa_cli.bench.questions import of_categories, read_questions, spread

        source = mt_bench_path() if self.questions is None else self.questions
        found, skipped = read_questions(source)
        if skipped:
            console.warn(f"{source}: {skipped} records are no questions and were skipped")
        return spread(of_categories(found, self.category), self.limit), len(found)


def load(choice: Choice, place: LoadFlags) -> "LoadedModel":
    """Assemble with a bar for what is timed on the way, and greet; errors as assembly's."""
    from medusa_cli.api import load_model

    with console.progress("timing steps", unit="steps") as bar:
        found = load_model(choice, place.loading, on_progress=bar.advance)
    console.info(place.of(found.description))
    return found


def follow_choice(choice: Choice, place: LoadFlags) -> LoadFlags:
    """As `follow`, for the drafter that was chosen, or that of the chosen run, whose model is decoded plainly."""
    folder = choice.drafter or (choice.run.drafter_dir if choice.run else None)
    return place if folder is None else follow(folder, place)


def follow(folder: Path, place: LoadFlags) -> LoadFlags:
    """Where and how to load the backbone of the drafter in a folder, with load_in_4bit and load_in_8bit settled.

    Flags that were given, either way, are obeyed; without any the weights are rounded as they were in training.
    """
    from medusa_cli.engine.kernels import BITS

    flags = {"4bit": place.load_in_4bit, "8bit": place.load_in_8bit}
    if all(flags.values()):
        return place  # the loader says that they exclude each other
    asked = next((how for how, given in flags.items() if given), None)
    made = rounding_in(folder)
    if made is not None and asked != made:
        if all(given is None for given in flags.values()) and place.engine not in BITS:
            console.info(
                f"loading the model in {made}, as {folder} was trained on it; --no-load-in-{made} loads it whole"
            )
            asked = made
        else:
            warn_of(folder, asked)
    return replace(place, load_in_4bit=asked == "4bit", load_in_8bit=asked == "8bit")


def warn_of(folder: Path, rounding: str | None) -> None:
    """Warn where a drafter was trained on weights rounded in another way than the backbone's now."""
    made = rounding_in(folder)
    if made is not None and made != rounding:
        console.warn(
            f"{folder} was trained on the model in {made}: its guesses, and an adapter beside it, are not made for "
            f"other weights; --load-in-{made} loads those"
        )
