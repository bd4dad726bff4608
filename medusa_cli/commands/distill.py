"""`medusa distill`: a model answers seed prompts, and its conversations become training data."""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import assets, console, options
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
_NAME = "The model's name on the servers. [default: found by asking]"
_CONCURRENCY = "With --endpoint: conversations at a time. [default: 8]"
_CONTEXT = "Positions of a conversation; longer prompts are skipped. [default: 512]"
_RECIPE = "Recipe YAML whose model and distill section are the defaults here."
_BATCH = "Conversations decoded at a time. [default: as many as the memory holds, at most 64]"
_TAPS = "Also keep the states after these layers, such as 10,20, for `train drafter.taps=[10,20]`."
_DEDUP = "Answer one of the seeds whose first prompts differ in case and white space alone. [default: --dedup]"
_SHORTEST = "Drop conversations with a shorter answer. [default: 0]"
_SYSTEM = "System prompt of the seeds that have none. [default: what the model's chat template sets]"
_REFUSALS = 'Drop conversations with an answer such as "I can\'t assist with that".'
_TEMPLATE = "Jinja template for a model whose tokenizer has none; the run keeps it."


def distill(
    ctx: typer.Context,
    *,
    seed: options.Seed = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    max_samples: options.MaxSamples = None,
    max_new_tokens: options.MaxNewTokens = None,
    max_turns: Annotated[Size, flag("--max-turns N", "Turns answered in each conversation. [default: 2]")] = None,
    context: Annotated[Size, flag("--context N", _CONTEXT)] = None,
    temperature: options.Temperature = None,
    random_seed: options.RandomSeed = None,
    endpoint: Annotated[str | None, flag("--endpoint URL[,URL]", _ENDPOINT)] = None,
    endpoint_model: Annotated[str | None, flag("--endpoint-model NAME", _NAME)] = None,
    concurrency: Annotated[Size, flag("--concurrency N", _CONCURRENCY, min=1)] = None,
    recipe: Annotated[Path | None, flag("--recipe FILE", _RECIPE)] = None,
    batch_size: Annotated[Size, flag("--batch-size N", _BATCH, min=1)] = None,
    taps: Annotated[str | None, flag("--taps LIST", _TAPS)] = None,
    dedup: Annotated[bool | None, flag("--dedup/--no-dedup", _DEDUP)] = None,
    min_answer_tokens: Annotated[Size, flag("--min-answer-tokens N", _SHORTEST, min=0)] = None,
    system: Annotated[str | None, flag("--system TEXT", _SYSTEM)] = None,
    drop_refusals: Annotated[bool | None, flag("--drop-refusals/--keep-refusals", _REFUSALS)] = None,
    chat_template: Annotated[Path | None, flag("--chat-template FILE", _TEMPLATE)] = None,
    resume: Annotated[bool, flag("--resume", "Fail unless there is a distillation to resume.")] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Make training data: the model answers seed prompts in its own words.

    Appends to RUN/distill.jsonl and keeps the hidden states beside it, so that training needs no second pass.
    Run the same command again to resume after an interruption, or with a larger --max-samples to get more.
    Under torchrun (with --run-dir for --run) the processes share the work, each on its own GPU.
    """
    first = os.environ.get("RANK", "0") == "0"
    printing.configure(first=first)
    assets.need_extra("train", "`medusa distill`")
    if endpoint is not None and taps is not None:
        raise UsageError("--taps has no effect with --endpoint: servers send no states", "leave one of them out")
    if endpoint is not None and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("--endpoint needs one process", "start it without torchrun and raise --concurrency")
    from medusa_cli.data.seeds import read_seeds
    from medusa_cli.distill.distillation import check_settings
    from medusa_cli.distill.distillation import distill as answer_seeds
    from medusa_cli.model.distributed import Distributed
    from medusa_cli.runs.recipe import DistillRecipe, recipe_of
    from medusa_cli.runs.run import Run, sole_writer

    flags = {f"distill.{field.name}": ctx.params[field.name] for field in fields(DistillRecipe)}
    flags["distill.taps"] = None if taps is None else f"[{taps}]"
    if recipe is None and max_samples is None:
        flags["distill.max_samples"] = BARE_SAMPLES
    # Each process ends when its share is done, and the shares may differ by hours.
    processes = Distributed.join(loading.device, backend="gloo")
    with processes.main_process_first():  # it fetches what all read
        target = Run.open(run, create=not resume)
        if resume and not target.distill_path.is_file():
            raise UserError(f"--resume: {target.path} holds no distillation", "leave --resume out to begin one")
        words = {"model": model, "chat_template": chat_template, **flags}
        plan = recipe_of(target, [] if recipe is None else [str(recipe)], words, resume=False, origin=target)
        settings = plan.distill
        check_settings(settings)
        seeds, report = read_seeds(settings.seed, settings.random_seed, settings.max_samples)
        if first:  # the others write parts of their own
            ctx.with_resource(sole_writer(target.path, "medusa distill"))
    count = min(len(seeds), settings.max_samples or len(seeds))
    console.info(
        f"{loading.of(plan.model)} answers {count:,} of {len(seeds):,} conversations of {settings.seed} into "
        f"{target.path}; --max-samples N takes more ({report})"
    )
    loading = replace(loading, device=processes.device(loading.device))
    with console.bars() as on_progress:
        summary = answer_seeds(target, seeds, plan, loading, processes, on_progress)
    processes.destroy()
    if summary is None:  # the first process prints for all
        return
    if printing.json:
        console.emit_json(summary)
    if not summary["conversations"]:
        raise UserError(
            f"{target.distill_path} holds no conversation: each was skipped, dropped, refused or failed",
            "give another --seed, a larger --context or fewer --max-new-tokens",
        )
    console.result(
        f"{summary['answer_tokens']:,} answer tokens in {summary['conversations']:,} conversations: "
        f"{target.distill_path} ({summary['new_tokens']:,} made now at {summary['tokens_per_s']:,.0f} tokens/s). "
        f"Next: medusa train --run {run}"
    )
