"""`medusa distill`: seed prompts in, conversations in the model's own words out."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.runs.run import DEFAULT_RUN

# Conversations of a bare run: about ten minutes of two cores with the default model.
BARE_SAMPLES = 800


def distill(
    asked: typer.Context,
    seed: options.Seed = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe YAML whose model and distill section are the defaults here.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja template for a model whose tokenizer has none; the run keeps it."),
    ] = None,
    max_samples: options.MaxSamples = None,
    max_new_tokens: options.MaxNewTokens = None,
    max_turns: Annotated[
        int | None,
        typer.Option("--max-turns", "--turns", metavar="N", help="Turns answered in each conversation. [default: 2]"),
    ] = None,
    self_talk: Annotated[
        bool,
        typer.Option("--self-talk", help="The model writes the human's turns too, all but the first of each seed."),
    ] = False,
    dedup: Annotated[
        bool,
        typer.Option(help="Of seeds whose first prompts differ in case and white space alone, answer one."),
    ] = True,
    min_answer_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Drop conversations with an answer shorter than this.")
    ] = 0,
    temperature: options.Temperature = None,
    random_seed: options.RandomSeed = None,
    context: Annotated[
        int | None, typer.Option(help="Positions a conversation may fill; longer prompts are skipped. [default: 512]")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Conversations that are decoded side by side. [default: as many as the memory holds, at most 64]",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL[,URL]",
            help="OpenAI-compatible servers of the model that answer instead of this machine (vLLM, SGLang, TGI, "
            "transformers serve). A key goes into the variable MEDUSA_API_KEY.",
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name on the servers. [default: found by asking]")
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="With --endpoint: conversations at a time.")] = 8,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on or fail, but begin nothing. The same command goes on without it, too."),
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    load_in_4bit: options.LoadIn4bit = None,
    load_in_8bit: options.LoadIn8bit = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Let the model answer seed prompts: training data in its own words.

    Appends to RUN/distill.jsonl and keeps the hidden states beside it, so that training needs no second pass.
    Run the same command again to resume after an interruption, or with a larger --max-samples to get more.
    Under torchrun (with --run-dir for --run) the processes share the work, each on its own GPU.
    """
    from medusa_cli.errors import UsageError, UserError
    from medusa_cli.runs.recipe import load_recipe

    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console.configure(quiet=quiet or rank > 0, json=json or rank > 0)  # one process of several speaks
    if endpoint is not None and self_talk:
        raise UsageError("--self-talk needs the model here: servers write no user's turn", "leave --endpoint out")
    if endpoint is not None and processes > 1:
        raise UsageError("--endpoint needs one process", "start it without torchrun and raise --concurrency")
    given = {
        "seed": seed,
        "max_samples": max_samples,
        "max_new_tokens": max_new_tokens,
        "max_turns": max_turns,
        "temperature": temperature,
        "random_seed": random_seed,
        "context": context,
        "batch_size": batch_size,
    }
    words = {f"distill.{key}": value for key, value in given.items()} | {"chat_template": chat_template}
    plan = load_recipe(recipe, [f"{key}={value}" for key, value in words.items() if value is not None])
    wanted = plan.distill
    count = wanted.max_samples or (BARE_SAMPLES if recipe is None else None)
    settings = settings_of(wanted, self_talk)

    from medusa_cli.commands.answering import Failures, Files, Meter, connect, from_here, from_server
    from medusa_cli.distilling import read_seeds
    from medusa_cli.distilling.engine import order
    from medusa_cli.distilling.filters import unique
    from medusa_cli.distilling.selftalk import check_self_talk
    from medusa_cli.distilling.tokenizer import Tokenizer
    from medusa_cli.engines import load_backbone
    from medusa_cli.engines.kernels import BITS
    from medusa_cli.runs.lock import sole_writer
    from medusa_cli.runs.run import Run, provenance
    from medusa_cli.training import World

    # The end of the work is where the processes wait for one another, and their shares may differ by hours.
    world = World.join(device, backend="gloo")
    if not world.first:
        world.wait()  # until the first has fetched what all read
    name = model or plan.model or DEFAULT_MODEL
    seeds, report = read_seeds(wanted.seed)
    chosen = order(seeds, settings, count)
    target = Run.open(run, create=not resume)
    if resume and not target.distill_path.is_file():
        raise UserError(f"--resume: {target.path} holds no distillation", "leave --resume out to begin one")
    if world.first:  # the others write parts of their own
        asked.with_resource(sole_writer(target.path, "medusa distill", console.warn))
    template = target.template_with(plan.chat_template)
    whose = options.called(name, {"trust_remote_code": trust_remote_code})
    console.info(
        f"{whose} answers {len(chosen):,} of {len(seeds):,} conversations of {wanted.seed} into {target.path}; "
        "--max-samples N takes more"
    )
    console.info(str(report))
    backbone: Any = (
        Tokenizer(name, template, trust_remote_code=trust_remote_code)
        if endpoint is not None
        else load_backbone(
            name,
            device=world.device(device),
            dtype=dtype,
            engine=engine,
            load_in_4bit=bool(load_in_4bit),
            load_in_8bit=bool(load_in_8bit),
            trust_remote_code=trust_remote_code,
            chat_template=template,
        )
    )
    if endpoint is None and wanted.batch_size is None:
        settings = replace(settings, batch_size=_side_by_side(backbone, settings, processes))
    rounded = {"4bit": load_in_4bit, "8bit": load_in_8bit, engine: engine in BITS} if endpoint is None else {}
    rounding = next((how for how, given in rounded.items() if given), None)  # answers of another model
    server = None if endpoint is None else connect(endpoint, endpoint_model, name, backbone)
    if self_talk:
        check_self_talk(backbone)
    target.bind(backbone.identity)
    header = provenance(backbone.identity, **_header(wanted, self_talk, template, rounding))
    files = Files(world, target, backbone.hidden_size, header, min_answer_tokens)
    failures = Failures(target, world.first)
    target.keep_template(template)
    kept = unique(chosen, files.answered) if dedup else chosen
    todo = [one for one in kept if one.id not in files.answered]
    if len(kept) < len(chosen):
        console.info(f"left out as they ask what another asks: {len(chosen) - len(kept):,} (--no-dedup keeps them)")
    if len(todo) < len(kept):
        console.info(f"resuming: {len(kept) - len(todo):,} conversations are there already")
    mine = world.share(todo)
    with console.progress("distilling", total=len(mine), unit="conversations") as bar:
        made = Meter(bar)
        try:
            if server is not None:
                skipped = from_server(server, mine, settings, concurrency, files.writer, failures, made)
            else:
                skipped = from_here(backbone, mine, settings, files.writer, failures, made)
        finally:
            files.writer.close()
    totals = files.end((len(skipped), failures.count, made.count, made.rate))
    whole = files.whole
    if whole is None:  # the first process speaks for all
        return
    too_long, failed, new_tokens, rate = (sum(column) for column in zip(*totals, strict=True))
    dropped = sum(tokens < min_answer_tokens for tokens in whole.dropped.values())
    if too_long:
        console.info(f"{too_long:,} prompts were skipped: longer than --context {wanted.context} leaves room for")
    if dropped:
        console.info(f"{dropped:,} conversations were dropped: an answer of fewer than {min_answer_tokens} tokens")
    if failed:
        console.warn(f"{failed:,} conversations failed, see {failures.path}; the same command asks for them again")
    summary = {
        "failed": failed,
        "run": str(target.path),
        "conversations": len(whole.done),
        "answer_tokens": whole.tokens,
        "skipped": too_long,
        "duplicates": len(chosen) - len(kept),
        "dropped": dropped,
        "new_tokens": new_tokens,
        "tokens_per_s": round(rate, 1),
    }
    console.emit_json(summary) if json else console.result(
        f"{whole.tokens:,} answer tokens in {len(whole.done):,} conversations: {target.distill_path} "
        f"({new_tokens:,} made now at {rate:,.0f} tokens/s). Next: medusa train --run {run}"
    )


def _side_by_side(backbone: Any, settings: Any, processes: int) -> int:
    """The conversations at a time that the memory free now holds; says so where they are fewer than usual."""
    from medusa_cli.backbone.memory import free_memory
    from medusa_cli.distilling.room import MOST, fitting

    shared = backbone.device.type != "cuda"  # by the processes of this machine, and with the states
    free = free_memory(backbone.device) // (int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if shared else 1)
    capacity = min(settings.capacity, backbone.max_positions)
    count = fitting(backbone.config, backbone.dtype, capacity, free, states_there=shared)
    if count < MOST:
        console.info(
            f"{count} conversations at a time: {free / 1e9:.1f} GB are free for their {capacity:,} positions each; "
            "--batch-size N takes others"
        )
    return count


def settings_of(wanted: Any, self_talk: bool = False) -> Any:
    """The engine's settings from a recipe's distill section; UsageError for numbers that cannot be."""
    from medusa_cli.distilling.engine import Settings
    from medusa_cli.distilling.room import MOST
    from medusa_cli.errors import UsageError

    if 0 < wanted.temperature < options.COLDEST:
        raise UsageError(f"distill.temperature={wanted.temperature} is too close to 0", "use 0 for greedy")
    return Settings(
        max_new_tokens=wanted.max_new_tokens,
        max_turns=wanted.max_turns,
        temperature=wanted.temperature,
        random_seed=wanted.random_seed,
        batch_size=wanted.batch_size or MOST,
        capacity=wanted.context,
        self_talk=self_talk,
    )


def _header(wanted: Any, self_talk: bool, template: str | None, rounding: str | None) -> dict[str, Any]:
    """What must agree for conversations to share one file."""
    keys = ("max_new_tokens", "max_turns", "temperature", "random_seed")
    settings = {key: getattr(wanted, key) for key in keys}
    # Named where they are used alone, so that files from before them go on.
    extras = {
        "self_talk": self_talk,
        "rounding": rounding,
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16] if template else None,
    }
    return {"seed": wanted.seed, "settings": settings | {key: value for key, value in extras.items() if value}}
