"""The words every command shares: one meaning, unit and help text each; the default is the command's."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli.assets import DEFAULT_MODEL, DEFAULT_SEED
from medusa_cli.runs.recipe import COLDEST
from medusa_cli.runs.run import DEFAULT_RUN

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
        "The prompts: sharegpt, self (the model asks itself), a JSON/JSONL file of conversations, or a dataset id of "
        "the hub. "
        f"[default: {DEFAULT_SEED}]",
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
