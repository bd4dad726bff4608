"""Options for loading a model, which determine its number type, its engine and its quantization."""

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from medusa_cli.errors import UsageError
from medusa_cli.runs.run import rounding_in

log = logging.getLogger(__name__)
# Weight quantizations of the native and the torch engine, and those of bitsandbytes.
INTEGER = ("int8", "int4")
BITSANDBYTES = ("bnb.int8", "bnb.nf4")
WORDS = {
    "dtype": ("auto", "bf16", "fp16", "fp32"),
    "engine": ("auto", "eager", "native", "torch"),
    "activations": ("auto", "fp32", "int8"),
    "quantize": ("none", *INTEGER, *BITSANDBYTES),
    "kv": ("fp32", "fp16", "q8_0"),
}


@dataclass(frozen=True)
class LoadOptions:
    """Holds options for loading a model: device, number type, engine, quantization, and whether its own code may run.

    activations: the number type of activations in matmuls with quantized weights. kv: the number type of the
    native engine's keys and values. exact: on a GPU, no draft changes a greedy answer.
    """

    device: str = "auto"
    dtype: str = "auto"
    engine: str = "auto"
    quantize: str | None = None
    trust_remote_code: bool = False
    activations: str = "auto"
    kv: str = "fp32"
    exact: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", self.device):
            fault = f"@device {self.device!r} is unknown"
            raise UsageError(fault, "use auto, cpu, mps, cuda or cuda:N")
        for name, words in WORDS.items():
            value = getattr(self, name)
            if value not in words and not (name == "quantize" and value is None):
                raise UsageError(f"@{name} {value!r} is unknown", f"use one of {', '.join(words)}")
        if self.engine == "eager" and self.native_options:
            fault = f"{self.native_options[0]} needs the native or the torch engine"
            raise UsageError(fault, "leave @engine out")
        if self.kv != "fp32" and self.engine == "torch":
            raise UsageError(f"@kv {self.kv} needs the native engine", "leave @engine out")
        if self.quantized and self.native_options:
            fault = f"{self.native_options[0]} has no effect with @quantize {self.quantize}"
            raise UsageError(fault, "leave one of them out")

        if self.exact and (self.engine in ("native", "eager") or self.kv != "fp32"):
            fault = "@exact needs the torch engine on a GPU"
            raise UsageError(fault, "leave it out, or give only @device cuda")

    @property
    def native_options(self) -> list[str]:
        """Returns the given options that need an engine with packed weights, with values such as "@kv fp16"."""
        given = {
            "quantize": self.quantize in INTEGER,
            "activations": self.activations != "auto",
            "kv": self.kv != "fp32",
        }
        return [f"@{name} {getattr(self, name)}" for name, is_given in given.items() if is_given]

    @property
    def quantized(self) -> bool:
        """Returns True if bitsandbytes quantizes the weights."""
        return self.quantize in BITSANDBYTES


DEFAULT_LOADING = LoadOptions()
Options = TypeVar("Options", bound=LoadOptions)


def as_trained(options: Options, drafter: Path | None) -> Options:
    """Returns the options. If they name no quantization, adds the one that a folder's drafter was trained with.

    Warns if they name a different one.
    """
    trained = rounding_in(drafter) if drafter is not None else None
    if trained in (None, options.quantize):
        return options
    if options.quantize is None:
        log.info(
            f"quantizing the model by {trained}, as {drafter} was trained on it; @quantize none loads it whole"
        )
        return replace(options, quantize=trained)
    log.warning(
        f"{drafter} was trained on the model quantized by {trained}: its drafts, and an adapter with it, fit other "
        f"weights less; @quantize {trained} loads those"
    )
    return options
