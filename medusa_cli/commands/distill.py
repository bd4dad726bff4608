"""`medusa distill`: a model answers seed prompts, and its conversations become training data."""

import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import extras
from medusa_cli.files.model_files import check_chat_template, check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.options import LoadFlags, OutputFlags, flag
from medusa_cli.runs.run import DEFAULT_RUN, Run, sole_writer

if TYPE_CHECKING:
    from medusa_cli.runs.recipe import Recipe

# Number of conversations without a recipe. They take about a quarter of an hour on two cores with
# the default model.
BARE_SAMPLES = 800
_RECIPE = "The file or name of a recipe, and settings such as distill.context=2048 or distill.taps=[10,20]."
_ENDPOINT = (
    "OpenAI-compatible servers (vLLM, SGLang, TGI, transformers serve) that run the model and answer instead of this "
    "machine. They get the key in MEDUSA_API_KEY."
)
_SYSTEM = "System prompt for seeds that have none. [default: the chat template's]"
_REFUSALS = 'Drop conversations with an answer such as "I can\'t assist with that".'
_TEMPLATE = "Chat template (Jinja) for a model whose tokenizer has none; it is saved in the run."


def distill(
    ctx: typer.Context,
    *,
    recipe: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE.yaml] [KEY=VALUE ...]", help=_RECIPE)
    ] = None,
    seed: options.Seed = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    max_samples: options.MaxSamples = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    random_seed: options.RandomSeed = None,
    endpoint: Annotated[str | None, flag("--endpoint URL[,URL]", _ENDPOINT)] = None,
    system: Annotated[str | None, flag("--system TEXT", _SYSTEM)] = None,
    drop_refusals: Annotated[
        bool | None, flag("--drop-refusals/--keep-refusals", _REFUSALS)
    ] = None,
    chat_template: Annotated[Path | None, flag("--chat-template FILE", _TEMPLATE)] = None,
    resume: Annotated[
        bool, flag("--resume", "Fail if the run has no distillation to resume.")
    ] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Make training data: the model answers seed prompts in its own words.

    Appends to RUN/distill.jsonl and keeps the hidden states next to it, so that training need not
    run the model again. Run the same command again to resume after an interruption, or with a larger
    --max-samples to get more conversations. Under torchrun (with --run-dir instead of --run), the
    processes share the work, each on its own GPU.
    """
    first = os.environ.get("RANK", "0") == "0"
    printing.configure(first=first)
    extras.need_extra("train", "`medusa distill`")
    from medusa_cli.data.seeds import read_seeds
    from medusa_cli.distill.distillation import distill as answer_seeds
    from medusa_cli.model.distributed import Distributed
    from medusa_cli.runs.recipe_files import recipe_of, split_words

    words = recipe or []
    file, settings = split_words(words)
    if endpoint is not None:
        _check_beside_endpoint(settings)
    if file is None and max_samples is None and "distill.max_samples" not in settings:
        max_samples = BARE_SAMPLES
    flags = {
        "model": model,
        "chat_template": chat_template,
        "distill.seed": seed,
        "distill.max_samples": max_samples,
        "distill.max_new_tokens": max_new_tokens,
        "distill.temperature": temperature,
        "distill.random_seed": random_seed,
        "distill.endpoint": endpoint,
        "distill.system": system,
        "distill.drop_refusals": drop_refusals,
    }
    # Each process ends when its share is done, and the shares may differ by hours.
    processes = Distributed.join(loading.device, backend="gloo")
    # The first process fetches the files that all processes read.
    with processes.main_process_first():
        target = Run.open(run) if resume else Run.planned(run)
        if resume and not target.distill_path.is_file():
            fault = f"--resume: {target.path} holds no distillation"
            raise UserError(fault, "leave --resume out to begin one")
        plan = recipe_of(target, words, flags, resume=False)
        asked = plan.distill
        _check(plan, loading)
        seeds, report = read_seeds(asked.seed, asked.random_seed, asked.max_samples)
        if first:  # the other processes write separate parts
            ctx.with_resource(sole_writer(target.path, "medusa distill"))
    count = min(len(seeds), asked.max_samples or len(seeds))
    console.info(
        f"{loading.of(plan.model)} answers {count:,} of {len(seeds):,} conversations of {asked.seed} into "
        f"{target.path}; --max-samples N takes more ({report})"
    )
    console.info(
        f"prompts above {asked.context - asked.max_new_tokens:,} tokens, earlier turns included, are skipped: "
        f"distill.context={asked.context} less --max-new-tokens {asked.max_new_tokens}"
    )
    loading = replace(loading, device=processes.device(loading.device))
    with console.bars() as show:
        summary = answer_seeds(target, seeds, plan, loading, processes, show)
    processes.destroy()
    if summary is not None:  # the first process prints for all processes
        _report(summary, target, printing.json)


def _check_beside_endpoint(settings: Container[str]) -> None:
    """Raises UsageError for settings that --endpoint excludes."""
    if "distill.taps" in settings:
        text = "distill.taps has no effect with --endpoint: servers send no states"
        raise UsageError(text, "leave one of them out")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        fault = "--endpoint needs one process"
        raise UsageError(fault, "start it without torchrun and raise distill.concurrency")


def _check(plan: "Recipe", loading: LoadFlags) -> None:
    """Raises UserError for settings that are not valid, and for a model or servers that cannot answer."""
    from medusa_cli.data.seeds import NAMED
    from medusa_cli.distill.distillation import check_settings
    from medusa_cli.files.chat_servers import ChatServers
    from medusa_cli.model.load import resolve_device

    check_settings(plan.distill)
    if plan.distill.endpoint is None:
        model = ModelSource.of(plan.model)
        check_model_files(model)
        if plan.chat_template is None and plan.distill.seed in NAMED:
            check_chat_template(model)
        resolve_device(loading.device)
    else:
        ChatServers(plan.distill.endpoint.split(",")).check()


def _report(summary: dict[str, Any], target: Run, json: bool) -> None:
    """Prints what was distilled, and what to do next; raises UserError if the run holds no conversation."""
    if json:
        console.emit_json(summary)
    if not summary["conversations"]:
        raise UserError(
            f"{target.distill_path} holds no conversation: each was skipped, dropped, refused or failed",
            "give another --seed, a larger distill.context or fewer --max-new-tokens",
        )
    console.result(
        f"{summary['answer_tokens']:,} answer tokens in {summary['conversations']:,} conversations: "
        f"{target.distill_path} ({summary['new_tokens']:,} made now at {summary['tokens_per_s']:,.0f} tokens/s). "
        f"Next: medusa train --run {target.argument}"
    )
