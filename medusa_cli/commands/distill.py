"""`medusa distill`: seed prompts in, conversations in the model's own words out."""

from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.run import DEFAULT_RUN

FAILED = "distill-failed.jsonl"
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
    batch_size: options.BatchSize = 64,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL[,URL]",
            help="OpenAI-compatible servers of the model that answer instead of this machine (vLLM, SGLang, TGI, "
            "transformers serve). A key goes into the variable MEDUSA_API_KEY.",
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name on the servers. [default: --model]")
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="With --endpoint: conversations at a time.")] = 8,
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
    server = None
    backbone: Any
    if endpoint is not None:
        from medusa_cli.distilling.endpoint import Endpoint, Tokenizer

        backbone = Tokenizer(name)
        server = Endpoint([url.rstrip("/") for url in endpoint.split(",")], endpoint_model or name, backbone)
        server.check()
    else:
        backbone = load_backbone(
            name, device=device, dtype=dtype, engine=engine, load_in_4bit=load_in_4bit, load_in_8bit=load_in_8bit
        )
    target.bind(backbone.identity)
    writer = RecordWriter(target, backbone.hidden_size, provenance(backbone.identity, **_header(wanted)))
    todo = [one for one in chosen if one.id not in writer.done]
    if len(todo) < len(chosen):
        console.info(f"resuming: {len(chosen) - len(todo):,} conversations are there already")
    skipped: list[Any] = []
    failed = 0
    with console.progress("distilling", total=len(todo), unit="conversations") as bar:
        made = _Meter(bar)
        try:
            if server is not None:
                failed = _from_server(server, todo, settings, concurrency, writer, made, bar)
            else:
                for sample in distill(backbone, todo, settings, on_tokens=made.tokens, on_skip=skipped.append):
                    writer.write(sample)
                    bar.advance(1)
        finally:
            writer.close()
    if skipped:
        console.info(f"{len(skipped):,} prompts were skipped: longer than --context {wanted.context} leaves room for")
    if failed:
        where = target.path / FAILED
        console.warn(f"{failed:,} conversations failed, see {where}; the same command asks for them again")
    summary = {
        "failed": failed,
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


def _from_server(
    server: Any, todo: list[Any], settings: Any, concurrency: int, writer: Any, made: "_Meter", bar: Any
) -> int:
    """Write what the servers answer, and the seeds that failed into a side file; how many of those there are."""
    import json

    from medusa_cli.distilling.endpoint import Failed, distill_endpoint
    from medusa_cli.run import write_atomic

    failed: list[Failed] = []
    for sample in distill_endpoint(server, todo, settings, concurrency=concurrency, on_tokens=made.tokens):
        bar.advance(1)
        if isinstance(sample, Failed):
            failed.append(sample)
        else:
            writer.write(sample)
    lines = [json.dumps(vars(one), ensure_ascii=False) + "\n" for one in failed]
    if failed:
        write_atomic(writer.path.with_name(FAILED), "".join(lines))
    else:
        writer.path.with_name(FAILED).unlink(missing_ok=True)
    return len(failed)


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
