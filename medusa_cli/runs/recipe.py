"""The recipe: every setting for distillation and training, from a YAML file and KEY=VALUE words."""

import dataclasses
import difflib
import json
import logging
import math
import re
import site
import sysconfig
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.files.io import is_whole, parse_yaml, read_text, read_yaml
from medusa_cli.runs.run import Provenance, Run, describe_drafter

SHARED = Path("share", "medusa-cli", "recipes")  # in an installed package
log = logging.getLogger(__name__)
# No count in a recipe needs to be larger, so a larger number is a typing error.
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Rank = Annotated[int, Meta(ge=1, le=65_536)]
Seed = Annotated[int, Meta(ge=0, le=2**62)]
Layers = tuple[int, ...]
Positive = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
# With a lower temperature, scores divided by it would exceed the range of their number type.
COLDEST = 1e-3
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a word",
    "bool": "true or false",
    "|": "or",
}
WORDS |= {"array": "a list of whole numbers such as [1,2]"}


def key(default: Any, meaning: str) -> Any:
    """Returns a recipe's field with its default, and with its meaning for the help and the docs."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class DrafterRecipe:
    """The drafter to train."""

    name: Literal["amphista", "eagle", "firp", "hydra", "medusa", "mtp"] = key(
        "medusa",
        "the drafter; drafter=NAME is short for it",
    )
    num_heads: Annotated[int, Meta(ge=1, le=64)] = key(
        5,
        "number of heads; head k predicts the token k + 1 positions ahead",
    )
    num_layers: Annotated[int, Meta(ge=1, le=16)] = key(1, "residual blocks in each head")
    vocabulary: Literal["auto", "draft", "own", "shared"] = key(
        "auto",
        "tokens that the heads score: draft (the most frequent in the data), own (all, one "
        "matrix per head), shared (all, with the model's lm_head); auto: draft if that is smaller",
    )
    draft_vocab_size: Count = key(12288, "size of the draft vocabulary in tokens")
    matrices: Literal["each", "one", "none"] = key(
        "each",
        "a vocabulary matrix for each head, one for all, or none: rows of the lm_head, which do not learn",
    )
    prefix_layers: Annotated[int, Meta(ge=0, le=4)] = key(
        0,
        "Hydra: decoder layers before the heads; 1 is Hydra++",
    )
    taps: Layers = key(
        (),
        "EAGLE: auxiliary hidden-state layers to read; []: a low, a middle and a high one",
    )
    intermediate_size: Count | None = key(
        None,
        "EAGLE: width of the layer's MLP, which has most of its weights; null: the model's own",
    )
    norm_before_residual: bool = key(
        False,
        "EAGLE: the layer adds to its normed input, as in speculators' checkpoints",
    )
    attention_layers: Annotated[int, Meta(ge=0, le=4)] = key(
        1,
        "Amphista: self-attention layers over the heads",
    )
    context: Literal["conversation", "answer"] = key(
        "conversation",
        "context of Hydra's prefix layers and Amphista's layers: the conversation or the answer",
    )
    conditional: Rank | None = key(
        None,
        "Medusa, Amphista, FIRP: rank of a bias from the previous draft token; null: no bias",
    )
    layers: Layers | None = key(
        None,
        "FIRP: the layer where each head's extra row enters; null: from 1/2 to 5/6 of the depth",
    )


@dataclass(frozen=True)
class DistillRecipe:
    """The conversations to distill."""

    seed: str = key(
        "sharegpt",
        "prompts: sharegpt, sharegpt-long, sharegpt-code, ultrachat, code, a file, or a hub data set",
    )
    max_samples: Count | None = key(None, "maximum number of conversations; null: all")
    max_new_tokens: Count = key(256, "maximum tokens per answer")
    max_turns: Count = key(2, "maximum turns per conversation")
    temperature: Annotated[float, Meta(ge=0, le=100)] = key(
        0.0,
        "sampling temperature; 0 is greedy",
    )
    random_seed: Seed = key(0, "seed of the sampler")
    context: Annotated[int, Meta(ge=16, le=10_000_000)] = key(
        512, "maximum positions per conversation"
    )
    batch_size: Count | None = key(
        None,
        "conversations decoded at a time; null: as many as fit in memory, at most 64, or 256 on a GPU",
    )
    taps: Layers = key((), "auxiliary hidden-state layers to keep besides the last state")
    dedup: bool = key(
        True,
        "skip a seed whose first prompt differs from an earlier one only in case or white space",
    )
    system: str | None = key(None, "system prompt of seeds that have none")
    drop_refusals: bool = key(False, "drop conversations with a refusal")
    min_answer_tokens: Annotated[int, Meta(ge=0)] = key(
        0,
        "drop conversations with a shorter answer",
    )
    endpoint: str | None = key(None, "URLs of servers that answer instead of this machine")
    endpoint_model: str | None = key(None, "the model's name on the servers; null: ask them")
    concurrency: Annotated[int, Meta(ge=1, le=65_536)] = key(
        8,
        "concurrent conversations on the servers",
    )


@dataclass(frozen=True)
class TrainRecipe:
    """The training. Sizes are in positions (answer tokens), and intervals in optimizer steps."""

    stage: Literal[1, 2] = key(1, "1: heads on the frozen model; 2: heads and model")
    epochs: Annotated[int, Meta(ge=1, le=10_000)] = key(2, "passes over the data")
    max_tokens: Count | None = key(800_000, "maximum positions over all epochs; null: no limit")
    batch_tokens: Annotated[int, Meta(ge=2, le=10_000_000)] = key(
        1024,
        "positions per micro-batch of whole conversations; if the model runs too: tokens with padding",
    )
    accumulation: Count = key(1, "micro-batches per step")
    optimizer: Literal["adamw", "adamw8bit"] = key(
        "adamw",
        "adamw, or adamw8bit, which keeps its state in 8 bits (bitsandbytes)",
    )
    lr: Positive | None = key(None, "the heads' peak learning rate; null: the drafter's default")
    min_lr_ratio: Share = key(0.05, "final learning rate as a fraction of the peak")
    warmup_steps: Annotated[int, Meta(ge=0)] = key(
        20,
        "steps over which the learning rate rises to its peak, at most a tenth of all",
    )
    decay: Share = key(0.8, "weight of head k's loss is decay^k")
    soft: Share = key(0.0, "share of soft targets, the model's own distribution")
    regress: Positive | None = key(
        None,
        "weight of a regression onto the model's hidden states, for Hydra, and for EAGLE with "
        "little data; null: the drafter's default",
    )
    scored: Annotated[int, Meta(ge=64, le=10_000_000)] | None = key(
        None,
        "sampled softmax: tokens scored per batch; null: the whole vocabulary",
    )
    states: Literal["kept", "fresh"] = key(
        "kept",
        "kept: stage 1 reads the model's hidden states from disk; fresh: it computes them in every step",
    )
    # Stage 2 (Medusa, section 3.2.2).
    tuning: Literal["lora", "qlora", "full"] = key(
        "lora",
        "stage 2: lora, qlora (the model in 4 bits), or full (all weights; writes the model and a new run)",
    )
    lora_rank: Rank = key(32, "stage 2: rank of the adapter")
    lora_alpha: Positive = key(
        16.0, "stage 2: alpha of the adapter, which scales it by alpha / rank"
    )
    lora_dropout: Share = key(0.05, "stage 2: dropout on the adapter's input")
    objective: Literal["kl", "ce"] = key(
        "kl",
        "stage 2: the model's loss, KL divergence to the original (kl) or cross-entropy (ce)",
    )
    lambda_0: Positive = key(0.2, "stage 2: peak weight of the heads' loss")
    schedule: Literal["constant", "warmup", "sine"] = key(
        "warmup",
        "stage 2: schedule of lambda_0: constant, warmup (heads first, then both, rising) or sine",
    )
    heads_first: Share = key(
        0.1,
        "stage 2, warmup: share of the steps in which only the heads learn",
    )
    backbone_lr: Positive | None = key(
        None,
        "stage 2: the model's peak learning rate; null: a quarter of the heads'",
    )
    max_length: Annotated[int, Meta(ge=16)] = key(
        1024,
        "if the model runs in every step (stage 2, states: fresh, firp): conversations are cut after this many tokens",
    )
    gradient_checkpointing: bool = key(
        False,
        "stage 2: recompute activations in the backward pass to save memory",
    )
    # Either stage.
    shard: bool = key(False, "under torchrun: each process holds a part of the model's layers")
    validation_fraction: Annotated[float, Meta(ge=0, le=0.5)] = key(
        0.05,
        "fraction of the conversations held out for validation",
    )
    validation_every: Count = key(50, "steps between validations")
    validation_tokens: Count = key(16_384, "positions per validation")
    checkpoint_every: Count = key(100, "steps between checkpoints")
    seed: Seed = key(0, "seed of data order, weight initialization and dropout")
    dtype: Literal["bf16", "fp32"] = key("bf16", "number type of the computation")
    save_dtype: Literal["bf16", "int8"] = key(
        "bf16",
        "number type of the drafter's file; int8 halves its size and is as fast on a CPU",
    )


@dataclass(frozen=True)
class Recipe:
    """The model and the sections of a recipe. chat_template is the text of a Jinja template."""

    model: str = key(
        DEFAULT_MODEL, "as --model: a named model, a folder, a GGUF file, or a Hugging Face id"
    )
    chat_template: str | None = key(
        None,
        "a Jinja file in the recipe's folder, for a tokenizer without a template",
    )
    drafter: DrafterRecipe = DrafterRecipe()
    distill: DistillRecipe = DistillRecipe()
    train: TrainRecipe = TrainRecipe()

    def to_dict(self) -> dict[str, Any]:
        """Returns every key and value as nested dictionaries."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """Returns the recipe as YAML that load_recipe reads back."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))


def meanings() -> dict[str, tuple[str, str]]:
    """Returns the default, as YAML writes it, and the meaning of every dotted key."""
    found: dict[str, tuple[str, str]] = {}
    for section in dataclasses.fields(Recipe):
        keys = (
            dataclasses.fields(section.default)
            if dataclasses.is_dataclass(section.default)
            else [section]
        )
        prefix = "" if keys == [section] else f"{section.name}."
        for field in keys:
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            found[f"{prefix}{field.name}"] = (default, field.metadata["meaning"])
    return found


@cache
def types() -> dict[str, Any]:
    """Returns the type of every dotted key."""
    types: dict[str, Any] = {}
    for section, kind in typing.get_type_hints(Recipe).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            types |= {f"{section}.{key}": hint for key, hint in hints.items()}
        else:
            types[section] = kind
    return types


def recipe_folders() -> list[Path]:
    """Returns the folders with the recipes that ship, in a clone or in an installed package."""
    above = Path(__file__).parents[2]
    clone = [above / "recipes"] if (above / "pyproject.toml").is_file() else []
    roots = dict.fromkeys([Path(sysconfig.get_path("data")), Path(site.getuserbase()), above])
    return [folder for folder in [*clone, *(root / SHARED for root in roots)] if folder.is_dir()]


def find_recipe(name: str | Path) -> Path:
    """Returns a recipe's path: `name` if it exists, else the shipped recipe of that name (with or without recipes/).

    Raises UserError, which lists the shipped recipes, if there is neither.
    """
    path = Path(name)
    if path.exists():
        return path
    shipped = {
        file.stem: file for folder in reversed(recipe_folders()) for file in folder.glob("*.yaml")
    }
    if path.parent in (Path(), Path("recipes")) and (
        own := shipped.get(path.name.removesuffix(".yaml"))
    ):
        return own
    raise UserError(
        f"the recipe {name} is not a file",
        f"give one, or the name of one that ships: {', '.join(shipped)}",
    )


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file (None: the defaults) and applies overrides, such as "train.lr=1e-3" or "drafter=hydra".

    A recipe that ships may be given by its name. Raises UserError for an unreadable file, UsageError for an unknown key
    or a value that is not valid.
    """
    recipe = Recipe()
    if path is not None:
        path = find_recipe(path)
        data = read_yaml(path)
        if not isinstance(data, dict):
            fault = "is empty" if data is None else "is not a mapping of keys"
            raise UserError(f"the recipe {path} {fault}", "write keys such as `train: {lr: 1e-3}`")
        for key, value in _flatten(data):
            recipe = _with(recipe, _full(key, f"the recipe {path}"), value, path.parent)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UsageError(
                f"{shown(override)} is not an override", "write key=value, such as train.lr=1e-3"
            )
        name = _full(key.strip(), "the command line")
        text = text.strip()
        whole = (
            types()[name] in (str, str | None) and text != "null"
        )  # text stays text, however YAML would read it
        recipe = _with(recipe, name, text if whole else _parsed(text))
    return recipe


def _with(recipe: Recipe, key: str, value: Any, folder: Path | None = None) -> Recipe:
    """Returns the recipe with one setting changed; a chat template is read from its file, in `folder` if given."""
    value = _valid(key, value)
    if key == "chat_template" and value is not None:
        value = template_text(value, folder)
    section, dot, name = key.partition(".")
    if dot:
        value = dataclasses.replace(getattr(recipe, section), **{name: value})
    return dataclasses.replace(recipe, **{section: value})


def _full(key: str, source: str) -> str:
    """Returns the full name of a key; raises UsageError with the nearest known key for an unknown one."""
    key = "drafter.name" if key == "drafter" else key
    if key in types():
        return key
    near = difflib.get_close_matches(key, types(), n=1, cutoff=0.5)
    if not near:  # the section may be missing or wrong: compare the last part only
        by_last = {known.rpartition(".")[2]: known for known in types()}
        near = [
            by_last[name]
            for name in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)
        ]
    sections = ", ".join(dict.fromkeys(known.partition(".")[0] for known in types()))
    raise UsageError(
        f"{source} has the unknown key {shown(key)}",
        f"did you mean {near[0]!r}?" if near else f"use one of {sections}",
    )


def _valid(key: str, value: Any) -> Any:
    """Returns the value in its key's type; raises UsageError, with key and value, if it does not fit the type."""
    kind = types()[key]
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    try:
        # Not strict, because YAML reads 1e-3, which has no decimal point, as text.
        number = msgspec.convert(value, kind, strict=False)
        if isinstance(number, float) and not math.isfinite(number):
            expected = "a finite number"
        elif isinstance(number, str) and not is_whole(number):
            expected = "text in UTF-8"
        else:
            return number
    except msgspec.ValidationError as reason:
        text = "Expected `array`" if "$[" in str(reason) else str(reason)
        words = re.findall(r"Expected (.*?)(?:, got .*)?$", text) or ["a smaller number"]
        expected = re.sub(
            r"[a-z]+|\|", lambda word: WORDS.get(word[0], word[0]), words[0].replace("`", "")
        )
        expected = f"one of {', '.join(map(str, choices))}" if choices else expected
    raise UsageError(f"{key}={shown(value)} is not valid", f"use {expected}")


def _parsed(text: str) -> Any:
    """Returns the value that YAML reads from a word, or the word itself if it is not YAML."""
    import yaml

    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return text


def template_text(value: str, folder: Path | None = None) -> str:
    """Returns the text of a chat template: the value itself if it has braces, otherwise the text of that file.

    A recipe may refer only to a file in its own `folder`; the command line (None) may refer to any file. Raises
    UserError for other files, and for a file that cannot be read.
    """
    if "{" in value:
        return value
    name = f"@chat_template {shown(value)}"
    remedy = "give a Jinja file"
    try:
        path = (folder or Path()) / value
        if folder is not None and not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{name} lies outside the recipe's folder",
                f"{remedy} in it, or name it on the command line",
            )
        return read_text(path, f"{name}:", remedy=remedy)
    except (OSError, ValueError) as reason:  # not a valid file name
        raise UserError(f"{name} cannot be read", remedy) from reason


def _flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(old: dict[str, Any], new: Recipe, sections: Sequence[str]) -> list[str]:
    """Returns the dotted keys in the sections whose values differ from those of an old recipe, given as a dict."""
    before = dict(_flatten(old))
    after = [
        (key, value) for key, value in _flatten(new.to_dict()) if key.split(".")[0] in sections
    ]
    return [key for key, value in after if before.get(key) != value]


def split_words(words: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Returns the recipe's file, if one is given, and the text of each KEY=VALUE setting."""
    files = [word for word in words if "=" not in word or word.endswith((".yaml", ".yml"))]
    if len(files) > 1:
        raise UsageError(
            f"{files[1]!r} is a second recipe", "give one recipe file and KEY=VALUE settings"
        )
    settings = {}
    for word in words:
        if word not in files:
            key, _, value = word.partition("=")
            settings[key.strip()] = value
    return next(iter(files), None), settings


def recipe_of(
    run: Run,
    words: Sequence[str],
    flags: Mapping[str, Any],
    resume: bool,
    origin: Run | None = None,
) -> Recipe:
    """Returns a command's recipe: its file (by default, a resumed run's own), then KEY=VALUE words, then flags.

    Unless words or flags set them, the model and the chat template come from the run, or else from the run `origin`,
    if it has them. Without a file, the settings of the drafter and its loss are those of `origin`.
    """
    file, settings = split_words(words)
    settings |= {key: str(value) for key, value in flags.items() if value is not None}
    if file is None and origin is not None and not resume:
        settings = _settings_of(origin, settings) | settings
    overrides = [f"{key}={value}" for key, value in settings.items()]
    giver = run if origin is None or run.recorded_model is not None else origin
    if resume and file is None and run.recipe_path.is_file():
        recipe = load_recipe(run.recipe_path, overrides)
    else:
        recipe = load_recipe(file, overrides)
        model: str | int | None = None if "model" in settings else giver.model
        if (
            model is None
            and "model" not in settings
            and giver is origin
            and (recorded := _recorded(giver)) is not None
        ):
            model = recorded.identity.get("id")  # of an included drafter, which is in no run
        if model not in (None, recipe.model):
            recipe = _of_model(recipe, str(model), file, keep_template="chat_template" in settings)
    return dataclasses.replace(
        recipe, chat_template=run.template_with(recipe.chat_template or giver.chat_template)
    )


def _recorded(run: Run) -> Provenance | None:
    """Returns what a run's drafter records of its training; None if the run has no drafter."""
    has_drafter = (run.drafter_dir / "config.json").is_file()
    return describe_drafter(run.drafter_dir).provenance if has_drafter else None


def _settings_of(origin: Run, asked: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a run's drafter, its loss and its held-out part, as its training recorded them.

    The result is empty if another kind of drafter is requested.
    """
    provenance = _recorded(origin)
    if provenance is None:
        return {}
    recorded = provenance.recipe
    kind = asked.get("drafter") or asked.get("drafter.name")
    if kind not in (None, recorded.drafter.get("name")):
        return {}
    # With another held-out part, the new run would be judged on what the heads were trained on.
    keys = ("decay", "soft", "regress", "scored", "validation_fraction")
    loss = {key: getattr(recorded.train, key) for key in keys}
    settings = {f"drafter.{key}": value for key, value in recorded.drafter.items()}
    settings |= {f"train.{key}": value for key, value in loss.items() if value is not None}
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in settings.items()
        if key in types()
    }


def _of_model(recipe: Recipe, model: str, file: str | None, keep_template: bool) -> Recipe:
    """Returns a recipe for a run's model; if its file names another model, warns and drops that chat template."""
    if file is not None and "model" in read_yaml(find_recipe(file)):
        log.warning(
            f"the recipe {file} is for the model {recipe.model}, and the run's is {model}, which is taken; "
            f"@model {recipe.model} takes the recipe's"
        )
        if not keep_template:
            recipe = dataclasses.replace(recipe, chat_template=None)
    return dataclasses.replace(recipe, model=model)
