"""`medusa distill`: seed prompts in, conversations in the model's own words out."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console, extras, options
from medusa_cli.commands.asking import Servers, Wanted
from medusa_cli.commands.groups import Said, Where
from medusa_cli.errors import UserError
from medusa_cli.runs.run import DEFAULT_RUN

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone

# Conversations of a bare run: about ten minutes of two cores with the default model.
BARE_SAMPLES = 800


def distill(
    asked: typer.Context,
    *,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe YAML whose model and distill section are the defaults here.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja template for a model whose tokenizer has none; the run keeps it."),
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
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on or fail, but begin nothing. The same command goes on without it, too."),
    ] = False,
    what: Wanted,
    servers: Servers,
    place: Where,
    said: Said,
) -> None:
    """Let the model answer seed prompts: training data in its own words.

    Appends to RUN/distill.jsonl and keeps the hidden states beside it, so that training needs no second pass.
    Run the same command again to resume after an interruption, or with a larger --max-samples to get more.
    Under torchrun (with --run-dir for --run) the processes share the work, each on its own GPU.
    """
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    said.configure(first=rank == 0)  # one process of several speaks
    extras.need("train", "`medusa distill`")
    servers.check(self_talk, processes, what.taps)
    from medusa_cli.distilling.from_recipe import header_of, settings_of
    from medusa_cli.distilling.seeds import SELF
    from medusa_cli.runs.recipe import load_recipe

    words = what.settings | {"chat_template": chat_template}
    plan = load_recipe(recipe, [f"{key}={value}" for key, value in words.items() if value is not None])
    wanted = plan.distill if servers.endpoint is None else replace(plan.distill, taps=())  # servers tell no states
    asks = wanted.seed == SELF
    servers.check_seed(wanted.seed)
    count = wanted.max_samples or (BARE_SAMPLES if recipe is None or asks else None)
    settings = settings_of(wanted, self_talk)

    from medusa_cli.commands.answered import Outcome
    from medusa_cli.commands.answering import Files, Meter, connect, from_here, from_server, own_questions
    from medusa_cli.distilling import read_seeds
    from medusa_cli.distilling.distilled import order
    from medusa_cli.distilling.failures import Failures
    from medusa_cli.distilling.filters import unique
    from medusa_cli.distilling.room import MOST, side_by_side
    from medusa_cli.distilling.selftalk import check_opening, check_self_talk
    from medusa_cli.distilling.tokenizer import Tokenizer
    from medusa_cli.drafters.base import check_layers
    from medusa_cli.engines import load_backbone
    from medusa_cli.runs.lock import sole_writer
    from medusa_cli.runs.run import Run, provenance
    from medusa_cli.training import World

    # The end of the work is where the processes wait for one another, and their shares may differ by hours.
    world = World.join(place.device, backend="gloo")
    if not world.first:
        world.wait()  # until the first has fetched what all read
    seeds, report = ([], "") if asks else read_seeds(wanted.seed)
    chosen = order(seeds, settings, count)
    target = Run.open(run, create=not resume)
    if resume and not target.distill_path.is_file():
        raise UserError(f"--resume: {target.path} holds no distillation", "leave --resume out to begin one")
    if world.first:  # the others write parts of their own
        asked.with_resource(sole_writer(target.path, "medusa distill", console.warn))
    name = model or (target.model if recipe is None else None) or plan.model
    template = target.template_with(plan.chat_template)
    told = f"{len(chosen):,} of {len(seeds):,} conversations of {wanted.seed}"
    told = f"{count:,} questions of its own" if asks else told
    console.info(f"{place.of(name)} answers {told} into {target.path}; --max-samples N takes more")
    if report:
        console.info(str(report))
    speaker: Backbone | Tokenizer
    backbone = server = rounding = None
    if servers.endpoint is not None:
        speaker = Tokenizer(name, template, trust_remote_code=place.trust_remote_code)
        server = connect(servers.endpoint, servers.endpoint_model, name, speaker)
    else:
        given = replace(place, device=world.device(place.device)).loading
        speaker = backbone = load_backbone(name, **given, chat_template=template, rows=wanted.batch_size or MOST)
        check_layers(settings.taps, backbone.num_layers, "distill.taps")
        rounding = place.rounding  # answers of rounded weights are another model's
        if wanted.batch_size is None:
            settings = replace(settings, batch_size=side_by_side(backbone, settings, processes))
        if self_talk:
            check_self_talk(backbone)
        if asks:
            check_opening(backbone)
    target.bind(speaker.identity)
    header = provenance(speaker.identity, **header_of(wanted, self_talk, template, rounding))
    width = speaker.hidden_size * (1 + len(settings.taps))
    files = Files(world, target, width, header, min_answer_tokens)
    failures = Failures(target, world.first)
    target.keep_template(template)
    if asks and backbone is not None and count is not None:
        chosen = order(own_questions(backbone, world, target, settings, count), settings)
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
            if backbone is not None:
                skipped = from_here(backbone, mine, settings, files.writer, failures, made)
            elif server is not None:
                skipped = from_server(server, mine, settings, servers.concurrency, files.writer, failures, made)
        finally:
            files.writer.close()
    totals = files.end((len(skipped), failures.count, made.count, made.rate))
    whole = files.whole
    if whole is None:  # the first process speaks for all
        return
    outcome = Outcome(len(chosen) - len(kept), *(sum(column) for column in zip(*totals, strict=True)))
    room = (wanted.context, speaker.max_positions)
    outcome.show(whole, target, run, least=min_answer_tokens, room=room, json=said.json)
