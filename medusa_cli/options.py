"""The words every command shares: one meaning, unit and help text each; the default is the command's."""

import math
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli.assets import DEFAULT_MODEL, DEFAULT_SEED
from medusa_cli.runs.recipe import COLDEST
from medusa_cli.runs.run import DEFAULT_RUN

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "bf16", "fp16", "fp32")
ENGINES = ("auto", "eager", "fast", "int8", "int4")


def _device(value: str) -> str:
    kind, _, index = value.partition(":")
    if kind not in DEVICES or (index and not (index.isdigit() and kind == "cuda")):
        raise typer.BadParameter(f"{value!r} is none of {', '.join(DEVICES)}, cuda:N")
    return value


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(DTYPES)}")
    return value


def _engine(value: str) -> str:
    if value not in ENGINES:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(ENGINES)}")
    return value


def check_temperature(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"{value} is not a number of 0 or more; 0 is greedy")
    if value is not None and 0 < value < COLDEST:
        raise typer.BadParameter(f"{value} is too close to 0; 0 is greedy")
    return value


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FOLDER|ID",
        help=f"The backbone: a named model, a folder, or a Hugging Face id. [default: the run's, else {DEFAULT_MODEL}]",
        show_default=False,
    ),
]
_RUN = "The run directory: NAME means runs/NAME, anything with a / is a folder."
# torchrun takes "--run" for a beginning of its own "--run-path" and refuses it: hence the second name.
Run = Annotated[str, typer.Option("--run", "--run-dir", metavar="NAME", help=_RUN)]
# For the commands that fall back to the drafter that ships when no run is named.
RunOrShipped = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help=f"{_RUN} [default: what ships for the model]", show_default=False),
]
# For `tree`, which takes the default run where there is one.
RunOrDefault = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help=f"{_RUN} [default: {DEFAULT_RUN}, else what ships]", show_default=False),
]
# For `import`: the run and the model of a checkpoint.
RunOrNew = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run to write. [default: named after PATH|ID]", show_default=False),
]
ModelOrSaid = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FOLDER|ID",
        help="The backbone that the drafter is for. [default: the one that its config names]",
        show_default=False,
    ),
]
Drafter = Annotated[
    Path | None,
    typer.Option(
        "--drafter",
        metavar="FOLDER",
        help="A saved drafter. [default: the run's drafter/, else the one that ships for the model]",
        show_default=False,
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree",
        metavar="auto|static[:N]|dynamic[:N]|FILE",
        help="auto: of a size that pays on this machine and goes with the text, down to no drafts; static: the run's "
        "tree.json, or the best one of N nodes by the calibration; dynamic: a tree grown for every step, of as many "
        "nodes or N; or a file from `medusa tree` or medusa_choices list. [default: auto]",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        callback=_device,
        help="Where the backbone runs: auto, cpu, cuda[:N], mps.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        callback=_dtype,
        help="Number type that is computed in: auto (the fastest that is true to the checkpoint), bf16, fp16, fp32.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        callback=_engine,
        help="How the backbone runs: fast (lean layers over packed weights), eager (transformers' own), auto (fast "
        "where it knows the model), or int8 or int4: fast over weights rounded to so many bits, which changes the "
        "model (CPU).",
    ),
]
_ROUNDED = "[default: as the drafter was trained, else whole]"
LoadIn4bit = Annotated[
    bool | None,
    typer.Option(
        "--load-in-4bit/--no-load-in-4bit",
        help=f"Load the backbone's weights in 4 bits (bitsandbytes NF4). {_ROUNDED}",
        show_default=False,
    ),
]
LoadIn8bit = Annotated[
    bool | None,
    typer.Option(
        "--load-in-8bit/--no-load-in-8bit",
        help=f"Load the backbone's weights in 8 bits (bitsandbytes). {_ROUNDED}",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the Python files that come with the model; without it none ever is."),
]
Seed = Annotated[
    str | None,
    typer.Option(
        "--seed",
        metavar="NAME|FILE|ID",
        help="The prompts: sharegpt, a JSON/JSONL file of conversations, or a dataset id of the hub. "
        f"[default: {DEFAULT_SEED}]",
        show_default=False,
    ),
]
RandomSeed = Annotated[
    int | None,
    typer.Option(
        "--random-seed",
        metavar="N",
        min=0,
        max=2**62,
        help="Seed of the random generator. [default: 0]",
        show_default=False,
    ),
]
MaxSamples = Annotated[
    int | None,
    typer.Option(
        "--max-samples",
        metavar="N",
        min=1,
        help="At most this many conversations. [default: all there are, or what the command's first line says]",
        show_default=False,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        metavar="N",
        min=1,
        help="Longest answer, in tokens. [default: 512 in chat, 256 in distill and bench, 128 in demo]",
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        callback=check_temperature,
        help="Sampling temperature; 0 is greedy. [default: 0, or 0.7 with --sampling exact or typical]",
        show_default=False,
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", metavar="N", min=1, help="Conversations that are decoded side by side.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print results and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback when something fails.")]

Judge = Annotated[
    str | None,
    typer.Option(
        "--judge",
        metavar="URL",
        help="Let a model behind an OpenAI-compatible server grade the answers, and compare them in pairs, both "
        "orders. A key in MEDUSA_API_KEY goes along.",
    ),
]
JudgeModel = Annotated[str | None, typer.Option("--judge-model", metavar="NAME", help="The model that judges.")]

SamplingMode = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        metavar="MODE",
        help="greedy, exact (the model's own distribution) or typical (the paper's looser acceptance). "
        "[default: greedy, or exact with a --temperature]",
        show_default=False,
    ),
]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="P", help="Nucleus: sample from the top mass P; 1 is all of it.")
]
TopK = Annotated[int, typer.Option("--top-k", metavar="N", help="Sample from the N likeliest tokens; 0 is all.")]
