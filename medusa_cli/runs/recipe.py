"""A recipe: YAML plus `key=value` overrides, checked into frozen dataclasses; an unknown key is an error."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_cli.errors import UsageError, UserError


def _setting(default: Any, *, least: float | None = None, most: float | None = None, among: Sequence[str] = ()) -> Any:
    """A field with a default and the values it accepts: at least, at most, or one of a few words."""
    return field(default=default, metadata={"least": least, "most": most, "among": tuple(among)})


@dataclass(frozen=True)
class DrafterRecipe:
    """Which drafter to train: its name, heads, residual layers a head, and the vocabulary its heads score.

    vocabulary "draft" scores the draft_vocab_size most frequent tokens of the training data, "own" gives each
    head a full matrix, "shared" reads the frozen lm_head; "auto" is "draft" where that is smaller than "own".
    matrices: one for "each" head, or "one" for all of them. rank: their inner size, null for whole matrices.
    prefix_layers: Hydra's decoder layers before its heads (0: Hydra, 1: Hydra++); taps: after which of the model's
    layers it and EAGLE read states too, beside the final ones (EAGLE, where none is named: a low, a middle and a high
    one). attention_layers: Amphista's self-attention layers over its heads (1; 2 is its alpha variant). context: what
    Hydra's prefix and Amphista's adaptation layers see, the whole conversation or the answer alone. conditional: the
    rank of a bias that the token drafted before gives the scores of heads that draft at once (Medusa's, Amphista's,
    FIRP's), null for none. layers: after which of the model's layers the pseudo state of each of FIRP's heads enters,
    null for 1/2 to 5/6 of the depth; masked: whether it sees none of the earlier ones.
    """

    name: str = "medusa"
    num_heads: int = _setting(5, least=1)
    num_layers: int = _setting(1, least=1)
    vocabulary: str = _setting("auto", among=("auto", "draft", "own", "shared"))
    draft_vocab_size: int = _setting(12288, least=1)
    matrices: str = _setting("each", among=("each", "one"))
    rank: int | None = _setting(None, least=1)
    prefix_layers: int = _setting(0, least=0, most=4)
    taps: tuple[int, ...] = ()
    attention_layers: int = _setting(1, least=0, most=4)
    context: str = _setting("conversation", among=("conversation", "answer"))
    conditional: int | None = _setting(None, least=1)
    layers: tuple[int, ...] | None = None
    masked: bool = False


@dataclass(frozen=True)
class DistillRecipe:
    """The data: seed, conversations, tokens an answer, turns, temperature, random seed, positions."""

    seed: str = "sharegpt"
    max_samples: int | None = _setting(None, least=1)
    max_new_tokens: int = _setting(256, least=1)
    max_turns: int = _setting(2, least=1)
    temperature: float = _setting(0.0, least=0.0)
    random_seed: int = 0
    context: int = _setting(512, least=16)


@dataclass(frozen=True)
class TrainRecipe:
    """How to train: sizes are in positions (answer tokens), intervals in optimiser steps.

    A step takes `accumulation` micro-batches of `batch_tokens` positions. max_tokens bounds the positions of
    all epochs together (null: no bound). lr: the heads' peak rate (null: the drafter's own). Head k's loss weighs
    decay^k (Medusa, section 2.2.1). soft is the share of the backbone's own distribution in a target, the rest is
    the token it emitted: 0 is hard, 1 soft cross-entropy. regress weighs how far the state of a head that is told
    the tokens before its target (each of Hydra's, Amphista's first) is from the backbone's own there (null: what
    suits the drafter in stage 1, 0 in stage 2). heads_in_turn: FIRP's maps learn one after another, each for its share
    of the steps, as in its section 3.3; else at once. states: the model's states that stage 1 learns from are
    "kept" in the run, or made "fresh" in every step from whole conversations, which takes longer and no room on the
    disk (max_length and batch_tokens are then as in stage 2). shard: of several processes each holds a part of the
    backbone's layers, and gathers a layer to run it.

    Stage 2 alone reads what follows (section 2.2.2). tuning: LoRA, LoRA over 4-bit weights, or every weight. objective:
    KL to the original model, or cross-entropy. lambda_0 weighs the heads' loss, by `schedule`: constant, warmup
    (heads alone for the share heads_first of the steps, 1 for all, then rising to the end) or sine. backbone_lr: null
    is a quarter of the heads'. max_length: where conversations are cut; batch_tokens counts their tokens then, padding
    included. gradient_checkpointing: keep the states between layers alone and compute the rest again on the way back.
    """

    stage: int = _setting(1, least=1, most=2)
    tuning: str = _setting("lora", among=("lora", "qlora", "full"))
    lora_rank: int = _setting(32, least=1)
    lora_alpha: float = _setting(16.0, least=0.0)
    lora_dropout: float = _setting(0.05, least=0.0, most=1.0)
    objective: str = _setting("kl", among=("kl", "ce"))
    lambda_0: float = _setting(0.2, least=0.0)
    schedule: str = _setting("warmup", among=("constant", "warmup", "sine"))
    heads_first: float = _setting(0.1, least=0.0, most=1.0)
    backbone_lr: float | None = _setting(None, least=0.0)
    max_length: int = _setting(1024, least=16)
    gradient_checkpointing: bool = False
    shard: bool = False
    optimizer: str = _setting("adamw", among=("adamw", "adamw8bit"))
    epochs: int = _setting(2, least=1)
    max_tokens: int | None = _setting(800_000, least=1)
    lr: float | None = _setting(None, least=0.0)
    min_lr_ratio: float = _setting(0.05, least=0.0, most=1.0)
    warmup_steps: int = _setting(20, least=0)
    batch_tokens: int = _setting(1024, least=2)
    accumulation: int = _setting(1, least=1)
    clip: float = _setting(1.0, least=0.0)
    weight_decay: float = _setting(0.0, least=0.0)
    beta1: float = _setting(0.9, least=0.0, most=1.0)
    beta2: float = _setting(0.95, least=0.0, most=1.0)
    decay: float = _setting(0.8, least=0.0, most=1.0)
    soft: float = _setting(0.0, least=0.0, most=1.0)
    regress: float | None = _setting(None, least=0.0)
    heads_in_turn: bool = False
    states: str = _setting("kept", among=("kept", "fresh"))
    validation_fraction: float = _setting(0.05, least=0.0, most=0.5)
    validation_every: int = _setting(50, least=1)
    validation_tokens: int = _setting(16_384, least=1)
    checkpoint_every: int = _setting(100, least=1)
    seed: int = 0
    dtype: str = _setting("bf16", among=("bf16", "fp32"))


@dataclass(frozen=True)
class Recipe:
    """The whole recipe: the backbone's name and one section for each stage of the work.

    chat_template takes the place of the tokenizer's own, which some models lack: the name of a Jinja file, in a recipe
    beside it, or the template itself.
    """

    model: str = "smollm2-135m"
    chat_template: str | None = None
    drafter: DrafterRecipe = DrafterRecipe()
    distill: DistillRecipe = DistillRecipe()
    train: TrainRecipe = TrainRecipe()

    def to_dict(self) -> dict[str, Any]:
        """Every key and value as plain nested dictionaries."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """The recipe as YAML that load_recipe reads back."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file (None: the defaults) and apply overrides, "train.lr=1e-3" or "drafter=medusa".

    Raises UserError for an unreadable file, UsageError for an unknown key (with the nearest) or a bad value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_check(_flatten(_read(Path(path))), f"the recipe {path}", Path(path).parent))
    pairs: list[tuple[str, Any]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UsageError(f"{override!r} is no override", "write key=value, such as train.lr=1e-3")
        pairs.append((_known(key.strip(), "the command line"), text.strip()))
    pairs = [(key, text if _fields()[key][0] is str else _parse(text)) for key, text in pairs]
    return _build({**values, **_check(pairs, "the command line")})


def from_dict(data: dict[str, Any], source: str) -> Recipe:
    """A recipe from nested dictionaries (what to_dict gives); `source` names them in errors."""
    return _build(_check(_flatten(data), source))


def _check(pairs: Iterable[tuple[str, Any]], source: str, folder: Path = Path()) -> dict[str, Any]:
    """Checked values by their full names; a file that one of them names is read, from `folder`."""
    named = [(_known(key, source), value) for key, value in pairs]
    values = {key: _checked(key, value) for key, value in named}
    if values.get("chat_template") is not None:
        values["chat_template"] = _template(values["chat_template"], folder)
    return values


def _template(value: str, folder: Path) -> str:
    """The text of a chat template: the value itself, which then has braces, or what the file of that name holds."""
    if "{" in value:
        return value
    try:
        return (folder / value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise UserError(
            f"chat_template={value!r}: {folder / value} cannot be read", "give a Jinja file, beside the recipe"
        ) from reason


def _build(values: dict[str, Any]) -> Recipe:
    """A recipe from checked dotted keys; whatever is not named keeps its default."""
    recipe = Recipe()
    for key, value in values.items():
        section, dot, name = key.partition(".")
        changed = dataclasses.replace(getattr(recipe, section), **{name: value}) if dot else value
        recipe = dataclasses.replace(recipe, **{section: changed})
    return recipe


def differences(old: Recipe, new: Recipe, sections: Sequence[str]) -> list[str]:
    """The dotted keys of the given sections whose values differ."""
    before, after = dict(_flatten(old.to_dict())), dict(_flatten(new.to_dict()))
    return [key for key in before if key.split(".")[0] in sections and before[key] != after[key]]


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as reason:
        raise UserError(
            f"the recipe {path} does not exist", "check the path, or give none for the defaults"
        ) from reason
    except (IsADirectoryError, UnicodeDecodeError) as reason:
        raise UserError(f"the recipe {path} is no text file", "give a YAML file") from reason
    except yaml.YAMLError as reason:
        raise UserError(f"the recipe {path} is no YAML: {str(reason).splitlines()[0]}", "mend the file") from reason
    if data is None:
        raise UserError(f"the recipe {path} is empty", "write keys such as `train: {lr: 1e-3}`, or give no recipe")
    if not isinstance(data, dict):
        raise UserError(f"the recipe {path} is no mapping of keys", "write keys such as `train: {lr: 1e-3}`")
    return data


def _flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fields() -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (type, metadata) of every setting."""
    found: dict[str, tuple[Any, Any]] = {}
    for section, kind in typing.get_type_hints(Recipe).items():
        if not dataclasses.is_dataclass(kind):
            found[section] = (kind, {})
            continue
        hints = typing.get_type_hints(kind)
        found.update({f"{section}.{one.name}": (hints[one.name], one.metadata) for one in dataclasses.fields(kind)})
    return found


def _known(key: str, source: str) -> str:
    """The full name of a key (`drafter` alone is drafter.name); UsageError, with the nearest, if unknown."""
    key = {"drafter": "drafter.name", "firp.layers": "drafter.layers"}.get(key, key)
    known = _fields()
    if key in known:
        return key
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the section may be missing or wrong: compare the last part alone
        by_last = {one.rpartition(".")[2]: one for one in known}
        near = [by_last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)]
    sections = ", ".join(one.name for one in dataclasses.fields(Recipe))
    raise UsageError(
        f"{source} has the unknown key {key!r}",
        f"did you mean {near[0]!r}?" if near else f"use one of {sections}",
    )


def _parse(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _checked(key: str, value: Any) -> Any:
    """The value in its field's own type; UsageError, naming key and value, where it cannot be."""
    kind, limits = _fields()[key]
    optional = isinstance(kind, types.UnionType)
    if optional:
        if value is None:
            return None
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    plain = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    words = plain.get(kind, "a list of whole numbers such as [1,2]") + (" or null" if optional else "")
    fault = UsageError(f"{key}={value!r} is not {words}", f"give {words}")
    if kind is bool:
        if not isinstance(value, bool):
            raise fault
        return value
    if kind not in plain:
        if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
            raise fault
        return tuple(value)
    if isinstance(value, bool) or value is None:
        raise fault
    if kind is str:
        if not isinstance(value, str):
            raise fault
    else:
        # YAML reads 1e-3, without a point, as a string.
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise fault from None
        if not math.isfinite(number) or (kind is int and number != int(number)):
            raise fault
        value = kind(number)
    return _within(key, value, limits)


def _within(key: str, value: Any, limits: Any) -> Any:
    least, most, among = limits.get("least"), limits.get("most"), limits.get("among")
    if least is not None and value < least:
        raise UsageError(f"{key}={value} is too small", f"use {least:g} or more")
    if most is not None and value > most:
        raise UsageError(f"{key}={value} is too large", f"use {most:g} or less")
    if among and value not in among:
        raise UsageError(f"{key}={value!r} is unknown", f"use one of {', '.join(among)}")
    return value
