"""`medusa distill`: a model answers seed prompts, and its conversations become training data."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, extras, options
from medusa_cli.errors import UsageError, UserError
from medusa_cli.options import LoadFlags, OutputFlags, flag
from medusa_cli.runs.run import DEFAULT_RUN

# Conversations of a bare run: about ten minutes of two cores with the default model.
BARE_SAMPLES = 800
Size = int | None
_ENDPOINT = (
    "OpenAI-compatible servers of the model that answer instead of this machine (vLLM, SGLang, TGI, transformers "
    "serve). They get the key in MEDUSA_API_KEY."
)
_BATCH = "Conversations decoded at a time. [default: as many as the memory holds, at most 64]"
_TAPS = "Also keep the states after these layers, such as 10,20, for `train drafter.taps=[10,20]`."
_DEDUP = "Answer one of the seeds whose first prompts differ in case and white space alone."


def distill(
    context: typer.Context,
    *,
    seed: options.Seed = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    max_samples: options.MaxSamples = None,
    max_new_tokens: options.MaxNewTokens = None,
    max_turns: Annotated[Size, flag("--max-turns N", "Turns answered in each conversation. [default: 2]")] = None,
    positions: Annotated[
        Size, flag("--context N", "Positions of a conversation; longer prompts are skipped. [default: 512]")
    ] = None,
    temperature: options.Temperature = None,
    random_seed: options.RandomSeed = None,
    endpoint: Annotated[str | None, flag("--endpoint URL[,URL]", _ENDPOINT)] = None,
    endpoint_model: Annotated[
        str | None, flag("--endpoint-model NAME", "The model's name on the servers. [default: found by asking]")
    ] = None,
    concurrency: Annotated[
        int, flag("--concurrency N", "With --endpoint: conversations at a time.", min=1, show_default=True)
    ] = 8,
    recipe: Annotated[
        Path | None, flag("--recipe FILE", "Recipe YAML whose model and distill section are the defaults here.")
    ] = None,
    batch_size: Annotated[Size, flag("--batch-size N", _BATCH, min=1)] = None,
    taps: Annotated[str | None, flag("--taps LIST", _TAPS)] = None,
    dedup: Annotated[bool, flag("--dedup/--no-dedup", _DEDUP, show_default=True)] = True,
    min_answer_tokens: Annotated[
        int, flag("--min-answer-tokens N", "Drop conversations with a shorter answer.", min=0, show_default=True)
    ] = 0,
    chat_template: Annotated[
        Path | None,
        flag("--chat-template FILE", "Jinja template for a model whose tokenizer has none; the run keeps it."),
    ] = None,
    resume: Annotated[bool, flag("--resume", "Fail unless there is a distillation to resume.")] = False,
    place: LoadFlags,
    output: OutputFlags,
) -> None:
    """Make training data: the model answers seed prompts in its own words.

    Appends to RUN/distill.jsonl and keeps the hidden states beside it, so that training needs no second pass.
    Run the same command again to resume after an interruption, or with a larger --max-samples to get more.
    Under torchrun (with --run-dir for --run) the processes share the work, each on its own GPU.
    """
    first = os.environ.get("RANK", "0") == "0"
    output.configure(first=first)
    extras.need("train", "`medusa distill`")
    if endpoint is not None and taps is not None:
        raise UsageError("--taps has no effect with --endpoint: servers send no states", "leave one of them out")
    if endpoint is not None and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("--endpoint needs one process", "start it without torchrun and raise --concurrency")
    from medusa_cli.runs.recipe import load_recipe

    flags = {"seed": seed, "max_samples": max_samples, "max_new_tokens": max_new_tokens, "max_turns": max_turns,
             "temperature": temperature, "random_seed": random_seed, "context": positions, "batch_size": batch_size,
             "taps": None if taps is None else f"[{taps}]"}  # fmt: skip
    words = {"chat_template": chat_template, **{f"distill.{key}": value for key, value in flags.items()}}
    plan = load_recipe(recipe, [f"{key}={value}" for key, value in words.items() if value is not None])
    settings = plan.distill if endpoint is None else replace(plan.distill, taps=())
    if recipe is None and settings.max_samples is None:
        settings = replace(settings, max_samples=BARE_SAMPLES)

    from medusa_cli.data.seeds import read_seeds
    from medusa_cli.distill.distillation import DistillOptions, check_settings
    from medusa_cli.distill.distillation import distill as answer_seeds
    from medusa_cli.model.distributed import Distributed
    from medusa_cli.runs.run import Run, sole_writer

    check_settings(settings)
    # Each process ends when its share is done, and the shares may differ by hours.
    processes = Distributed.join(place.device, backend="gloo")
    with processes.first_ahead():  # it fetches what all read
        seeds, report = read_seeds(settings.seed)
        target = Run.open(run, create=not resume)
        if resume and not target.distill_path.is_file():
            raise UserError(f"--resume: {target.path} holds no distillation", "leave --resume out to begin one")
        if first:  # the others write parts of their own
            context.with_resource(sole_writer(target.path, "medusa distill", console.warn))
    name = model or (target.model if recipe is None else None) or plan.model
    count = min(len(seeds), settings.max_samples or len(seeds))
    console.info(
        f"{place.of(name)} answers {count:,} of {len(seeds):,} conversations of {settings.seed} into {target.path}; "
        f"--max-samples N takes more ({report})"
    )
    loading = replace(place, device=processes.device(place.device))
    servers = (endpoint, endpoint_model, concurrency)
    wanted = DistillOptions(name, settings, loading, plan.chat_template, *servers, dedup, min_answer_tokens)
    with console.bars() as on_progress:
        summary = answer_seeds(target, seeds, wanted, processes, on_progress)
    processes.destroy()
    if summary is None:  # the first process prints for all
        return
    if output.json:
        console.emit_json(summary)
    if not summary["conversations"]:
        raise UserError(
            f"{target.distill_path} holds no conversation: each was skipped, dropped or failed",
            "give another --seed, a larger --context or fewer --max-new-tokens",
        )
    console.result(
        f"{summary['answer_tokens']:,} answer tokens in {summary['conversations']:,} conversations: "
        f"{target.distill_path} ({summary['new_tokens']:,} made now at {summary['tokens_per_s']:,.0f} tokens/s). "
        f"Next: medusa train --run {run}"
    )
