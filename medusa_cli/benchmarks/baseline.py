"""The transformers model, unmodified, measured first and alone: no bench holds the weights of a model twice."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_cli.backbone import Backbone, adapter
from medusa_cli.backbone.identity import weights_of
from medusa_cli.backbone.network import DTYPES, has_own_code, load_network, resolve_device, resolve_dtype
from medusa_cli.benchmarks.drift import Remembered, remember
from medusa_cli.benchmarks.measure import Result
from medusa_cli.benchmarks.methods import Method
from medusa_cli.benchmarks.others import Transformers
from medusa_cli.decoding import Sampling
from medusa_cli.engines.kernels import BITS
from medusa_cli.engines.load import choose_kernel
from medusa_cli.errors import UserError
from medusa_cli.runs.resolve import Choice

Measured = Callable[[Backbone, Mapping[str, Method]], list[Result]]


def is_plain(name: str) -> bool:
    """Whether a method runs the unmodified transformers model."""
    return name.startswith("hf")


@dataclass(frozen=True)
class Baseline:
    """What the transformers model gave, which is gone by now; remembered: its distributions, for `drift`."""

    results: list[Result]
    dtype: torch.dtype
    remembered: Remembered | None


def measure_baseline(
    names: Sequence[str],
    choice: Choice,
    place: Mapping[str, Any],
    rule: Sampling,
    measured: Measured,
    draft_model: str | None = None,
) -> Baseline:
    """Load the model as transformers has it, let `measured` run the methods of these names, and let go of it.

    In the same type and place as the backbone of `place`, with the run's adapter. draft_model: the smaller model that
    drafts for "hf-assisted"; UserError for one of another vocabulary. Where the backbone is to be rounded, the
    distributions of "hf" are remembered.
    """
    network = _plain(choice, place)
    assistant = None if draft_model is None else _assistant(draft_model, network, place)
    methods: dict[str, Method] = {
        name: Transformers(network, rule, name == "hf-lookup", assistant if name == "hf-assisted" else None)
        for name in names
    }
    results = measured(network, methods)
    kept = remember(network, results) if "hf" in names and place["engine"] in BITS else None
    dtype = network.dtype
    del network, assistant, methods
    let_go()
    return Baseline(results, dtype, kept)


def let_go() -> None:
    """Give back the memory of a model that nothing names any more, before the next one comes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _plain(choice: Choice, place: Mapping[str, Any]) -> Backbone:
    """The network, with what lays out its conversations and knows its ends."""
    given = {key: value for key, value in place.items() if key not in ("engine", "dtype")}
    kind = next(name for name, dtype in DTYPES.items() if dtype == _states_type(choice.model, place))
    template = choice.run.chat_template if choice.run else None
    network, tokenizer = load_network(choice.model, dtype=kind, chat_template=template, **given)
    if choice.adapter is not None:
        quantised = bool(place["load_in_4bit"] or place["load_in_8bit"])
        network = adapter.merge(network, choice.adapter, beside=quantised)
    backbone = Backbone(network, tokenizer, id=choice.model, weights=weights_of(choice.model))
    network.set_attn_implementation("sdpa")  # its own again
    return backbone


def _states_type(model: str, place: Mapping[str, Any]) -> torch.dtype:
    """The type that load_backbone's engine will compute in."""
    device, dtype, engine = resolve_device(place["device"]), place["dtype"], place["engine"]
    rounded = place["load_in_4bit"] or place["load_in_8bit"]
    foreign = place["trust_remote_code"] and has_own_code(model)
    if engine == "eager" or foreign or (engine == "auto" and rounded):
        return resolve_dtype(dtype, model, device, place["trust_remote_code"])
    return choose_kernel(model, device, dtype, engine, None).rows


def _assistant(name: str, backbone: Backbone, place: Mapping[str, Any]) -> Any:
    network, tokenizer = load_network(name, **{key: value for key, value in place.items() if key != "engine"})
    if tokenizer.get_vocab() != backbone.tokenizer.get_vocab():
        raise UserError(
            f"@draft_model {name!r} does not write in the model's tokens",
            "give a smaller model of the same family, one that shares its tokenizer",
        )
    return network.eval()
