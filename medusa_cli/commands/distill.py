"""`medusa distill`: seed prompts in, conversations in the model's own words out."""

from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.run import DEFAULT_RUN

# Conversations of a bare run: about ten minutes of two cores with the default model.
BARE_SAMPLES = 800


def distill(
    seed: options.Seed = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe YAML whose model and distill section are the defaults here.")
    ] = None,
    max_samples: options.MaxSamples = None,
    max_new_tokens: options.MaxNewTokens = None,
    max_turns: Annotated[
        int | None, typer.Option(help="Human turns answered in each conversation. [default: 2]")
    ] = None,
    temperature: options.Temperature = None,
    random_seed: options.RandomSeed = None,
    context: Annotated[
        int | None, typer.Option(help="Positions a conversation may fill; longer prompts are skipped. [default: 512]")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Conversations generated side by side.")] = 64,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    load_in_4bit: options.LoadIn4bit = False,
    load_in_8bit: options.LoadIn8bit = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Let the model answer seed prompts: training data in its own words.

    Appends to RUN/distill.jsonl and keeps the hidden states beside it, so that training needs no second pass.
    Run the same command again to resume after an interruption, or with a larger --max-samples to get more.
    """
    from medusa_cli.recipe import load_recipe

    console.configure(quiet=quiet, json=json)
    given = {
        "seed": seed,
        "max_samples": max_samples,
        "max_new_tokens": max_new_tokens,
        "max_turns": max_turns,
        "temperature": temperature,
        "random_seed": random_seed,
        "context": context,
    }
    plan = load_recipe(recipe, [f"distill.{key}={value}" for key, value in given.items() if value is not None])
    wanted = plan.distill
    count = wanted.max_samples or (BARE_SAMPLES if recipe is None else None)
    settings = _settings(wanted, batch_size)

    from medusa_cli.backbone import load_backbone
    from medusa_cli.distilling import RecordWriter, distill, read_seeds
    from medusa_cli.distilling.engine import order
    from medusa_cli.run import Run, provenance

    name = model or plan.model or DEFAULT_MODEL
    seeds, report = read_seeds(wanted.seed)
    chosen = order(seeds, settings, count)
    target = Run.open(run, create=True)
    console.info(
        f"{name} answers {len(chosen):,} of {len(seeds):,} conversations of {wanted.seed} into {target.path}; "
        "--max-samples N takes more"
    )
    console.info(str(report))
    backbone = load_backbone(
        name, device=device, dtype=dtype, engine=engine, load_in_4bit=load_in_4bit, load_in_8bit=load_in_8bit
    )
    target.bind(backbone.identity)
    writer = RecordWriter(target, backbone.hidden_size, provenance(backbone.identity, **_header(wanted)))
    todo = [one for one in chosen if one.id not in writer.done]
    if len(todo) < len(chosen):
        console.info(f"resuming: {len(chosen) - len(todo):,} conversations are there already")
    skipped: list[Any] = []
    with console.progress("distilling", total=len(todo), unit="conversations") as bar:
        made = _Meter(bar)
        try:
            for sample in distill(backbone, todo, settings, on_tokens=made.tokens, on_skip=skipped.append):
                writer.write(sample)
                bar.advance(1)
        finally:
            writer.close()
    if skipped:
        console.info(f"{len(skipped):,} prompts were skipped: longer than --context {wanted.context} leaves room for")
    summary = {
        "run": str(target.path),
        "conversations": len(writer.done),
        "answer_tokens": writer.tokens,
        "skipped": len(skipped),
        "new_tokens": made.count,
        "tokens_per_s": round(made.rate, 1),
    }
    console.emit_json(summary) if json else console.result(
        f"{writer.tokens:,} answer tokens in {len(writer.done):,} conversations: {target.distill_path} "
        f"({made.count:,} made now at {made.rate:,.0f} tokens/s). Next: medusa train --run {run}"
    )


def _settings(wanted: Any, batch_size: int) -> Any:
    from medusa_cli.distilling.engine import Settings

    return Settings(
        max_new_tokens=wanted.max_new_tokens,
        max_turns=wanted.max_turns,
        temperature=wanted.temperature,
        random_seed=wanted.random_seed,
        batch_size=batch_size,
        capacity=wanted.context,
    )


def _header(wanted: Any) -> dict[str, Any]:
    """What must agree for conversations to share one file."""
    keys = ("max_new_tokens", "max_turns", "temperature", "random_seed")
    return {"seed": wanted.seed, "settings": {key: getattr(wanted, key) for key in keys}}


class _Meter:
    """Counts answer tokens and shows their rate in the bar's text."""

    def __init__(self, bar: Any) -> None:
        import time

        self._clock = time.perf_counter
        self._start, self._bar, self.count = self._clock(), bar, 0

    @property
    def rate(self) -> float:
        """Answer tokens a second so far."""
        return self.count / max(self._clock() - self._start, 1e-9)

    def tokens(self, count: int) -> None:
        self.count += count
        if self.count % 512 < count:
            self._bar.describe(f"distilling ({self.rate:,.0f} tokens/s)")
