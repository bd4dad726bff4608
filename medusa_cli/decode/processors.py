"""Transformers' logits processors, selected by the generation config and the request."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_cli.decode.grammar import Grammar, GrammarProcessor, matcher_of
from medusa_cli.decode.lazy_grammar import LazyGrammar, LazyGrammarProcessor
from medusa_cli.decode.sampling_options import Sampling
from medusa_cli.errors import UsageError, UserError, first_line, shown
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft

# Fields of a generation config that generate() reads, with their neutral values. PROCESSORS apply in
# every mode, WARPERS only in exact sampling.
PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "watermarking_config": None,
}
WARPERS: dict[str, Any] = {
    "min_p": 0.0,
    "top_h": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
# Only the caller sets these fields: a model's generation config does not choose the sampling or the
# length of the answer.
CALLERS: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "max_length": 20,
    "max_new_tokens": None,
}
# Fields that are not supported: other search methods, other stop criteria and additional passes.
NOT_DONE: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "token_healing": False,
    "num_return_sequences": 1,
    "stop_strings": None,
    "max_time": None,
}
PENALTY_LIMIT = 2.0  # the limit of the OpenAI API's penalties
log = logging.getLogger(__name__)


def _penalty(value: float) -> bool:
    return abs(value) <= PENALTY_LIMIT


def _count(value: int) -> bool:
    return isinstance(value, int) and value >= 0


def _ids(tokens: Iterable[int]) -> bool:
    return all(map(_count, tokens))


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "repetition_penalty": (
        lambda value: 0 < value < math.inf,
        "use a positive number; 1 is no penalty",
    ),
    "presence_penalty": (_penalty, f"use a number from -{PENALTY_LIMIT:g} to {PENALTY_LIMIT:g}"),
    "frequency_penalty": (_penalty, f"use a number from -{PENALTY_LIMIT:g} to {PENALTY_LIMIT:g}"),
    "no_repeat_ngram_size": (_count, "use a whole number; 0 allows repetitions"),
    "bad_words_ids": (
        lambda words: all(word and _ids(word) for word in words),
        "use lists of token ids",
    ),
    "suppress_tokens": (_ids, "use a list of token ids"),
    "min_new_tokens": (_count, "use a whole number; 0 is no minimum"),
    "logit_bias": (
        lambda bias: _ids(bias) and all(map(math.isfinite, bias.values())),
        "use {token id: number}",
    ),
    "grammar": (lambda grammar: isinstance(grammar, Grammar | LazyGrammar), "use a Grammar"),
}


@dataclass(frozen=True, kw_only=True)
class LogitsFields:
    """Holds the options that change single logits, named as in transformers; None selects the model's default.

    presence_penalty, frequency_penalty: see AdditivePenalties. logit_bias: numbers to add to the
    logits of tokens; they replace the model's sequence_bias.
    """

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    min_new_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None


@dataclass(frozen=True, kw_only=True)
class LogitsOptions(LogitsFields):
    """Holds the options that change the logits before a token is chosen.

    grammar: constrains the answer. Raises UsageError for invalid values.
    """

    grammar: Grammar | LazyGrammar | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            valid, remedy = CHECKS[name]
            try:
                well = valid(value)
            except (TypeError, AttributeError):
                well = False
            if not well:
                raise UsageError(f"@{name} {shown(value)} is not valid", remedy)

    @property
    def given(self) -> dict[str, Any]:
        """Returns the options that are set explicitly, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def check(self, backbone: Backbone) -> None:
        """Raises UsageError for token ids beyond the vocabulary and for grammars that cannot be followed."""
        vocabulary = backbone.vocab_size
        ids = {"bad_words_ids": [id for word in self.bad_words_ids or () for id in word]}
        ids |= {
            "suppress_tokens": [*(self.suppress_tokens or ())],
            "logit_bias": [*(self.logit_bias or ())],
        }
        for name, own in ids.items():
            check_ids(name, own, vocabulary)
        if isinstance(self.grammar, LazyGrammar):
            self.grammar.check(backbone)
        elif self.grammar is not None:
            matcher_of(backbone, self.grammar)


def check_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raises UsageError, with the argument's name, for ids that are not below the vocabulary's size."""
    for id in ids:
        if not 0 <= id < vocabulary:
            fault = f"@{name}: {id} is not a token id"
            raise UsageError(fault, f"use ids from 0 to {vocabulary - 1}")


MODELS_OWN = LogitsOptions()
# Processors that the sampler replaces with its own code.
TRUNCATION = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)


class AdditivePenalties(LogitsProcessor):
    """Subtracts the OpenAI API's penalties from the logits of tokens that already occur in the answer.

    presence: subtracted once per token; frequency: subtracted once per occurrence. Tokens of the
    prompt do not count, as in vLLM.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length = prompt_length
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the penalized logits [B, V] after the text [B, L]."""
        answer = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, answer, torch.ones_like(answer, dtype=scores.dtype)
        )
        return scores - self._presence * (counts > 0) - self._frequency * counts


class SequenceProcessors:
    """Holds the logits processors of a sequence and its text so far.

    Each new token is processed once, in order. truncates: True if the processors include temperature,
    top-k and top-p, because other processors follow these. Otherwise the sampler applies the three,
    which takes less time. grammar: the processor that follows a grammar, if there is one.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        text: Tensor,
        grammar: GrammarProcessor | LazyGrammarProcessor | None = None,
    ) -> None:
        self.truncates = any(isinstance(own, TRUNCATION) for own in processors)
        self._processors = processors
        self._text = text[None]
        self._grammar = grammar

    def __call__(self, logits: Tensor, following: Tensor | None = None) -> Tensor:
        """Returns the processed logits [V] in fp32 after the text and the tokens in `following`."""
        text = self._text if following is None else torch.cat([self._text, following[None]], dim=1)
        scores: Tensor = self._processors(text, logits[None].to(text.device, torch.float32))
        return scores[0]

    def along(self, draft: Draft, nodes: Sequence[int], logits: Tensor) -> Tensor:
        """Returns the processed logits [n, V] of some nodes of a draft, each after the path from the root to the node.

        The root is the last token of the text.
        """
        paths = [draft.tree.path(node)[1:] for node in nodes]
        return torch.stack(
            [self(row, draft.tokens[path]) for row, path in zip(logits, paths, strict=True)]
        )

    def fork(self) -> SequenceProcessors:
        """Returns the processors for another sequence with the same prompt and no answer yet."""
        grammar = None if self._grammar is None else self._grammar.fork()
        own = [grammar if other is self._grammar else other for other in self._processors]
        return SequenceProcessors(LogitsProcessorList(own), self._text[0], grammar)

    def warm_up(self, vocabulary: int) -> None:
        """Lets the processors compute now what they otherwise compute in their first call: biases, the first mask."""
        scores = torch.zeros(1, vocabulary, device=self._text.device)
        for processor in self._processors:
            if isinstance(processor, SequenceBiasLogitsProcessor | GrammarProcessor):
                processor(self._text, scores)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends chosen tokens to the text."""
        self._text = torch.cat([self._text, self._text.new_tensor([tokens])], dim=1)

    @property
    def exhausted(self) -> bool:
        """Returns True if the answer ended before its grammar was complete."""
        return self._grammar is not None and self._grammar.cuts_off(self._text)

    def forced(self) -> list[int]:
        """Returns the tokens that the grammar forces after the text."""
        return [] if self._grammar is None else self._grammar.forced(self._text)


def generate_arguments(
    sampling: Sampling,
    options: LogitsOptions,
    prompt_length: int,
    grammar: GrammarProcessor | LazyGrammarProcessor | None = None,
) -> dict[str, Any]:
    """Returns the arguments with which transformers' generate decodes as this package does with the options.

    All other settings come from the generation config.
    """
    arguments = {**NOT_DONE, **options.given}
    own = LogitsProcessorList()
    arguments.pop("grammar", None)
    presence = arguments.pop("presence_penalty", 0.0)
    frequency = arguments.pop("frequency_penalty", 0.0)
    if presence or frequency:
        own.append(AdditivePenalties(prompt_length, presence, frequency))
    # The grammar runs after all other processors except temperature and truncation, so it decides last.
    if grammar is not None:
        own.append(grammar)
    if (bias := arguments.pop("logit_bias", None)) is not None:
        arguments["sequence_bias"] = [
            [[token], float(value)] for token, value in bias.items()
        ] or None
    if options.repetition_penalty is not None:
        arguments["repetition_penalty"] = float(options.repetition_penalty)
    if options.bad_words_ids is not None:
        arguments["bad_words_ids"] = [list(word) for word in options.bad_words_ids] or None
    if options.suppress_tokens is not None:
        arguments["suppress_tokens"] = list(options.suppress_tokens) or None
    if sampling.exact:
        arguments |= {
            "temperature": float(sampling.temperature),
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
        arguments |= {} if sampling.min_p is None else {"min_p": sampling.min_p or None}
    else:  # transformers warns about arguments that greedy decoding ignores
        arguments |= dict.fromkeys(["temperature", "top_k", "top_p", *WARPERS])
    return {**arguments, "do_sample": sampling.exact, "logits_processor": own}


def sequence_processors(
    backbone: Backbone,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Iterable[int],
    sampling: Sampling,
    options: LogitsOptions,
) -> SequenceProcessors | None:
    """Returns the logits processors that transformers' generate uses for a sequence.

    Returns None if the only ones are temperature, top-k and top-p. Raises UsageError for token ids
    beyond the vocabulary, and UserError for an invalid generation config.
    """
    config = backbone.generation_config
    ends = sorted(stop_ids) or None
    defaults = {**PROCESSORS, **WARPERS} if sampling.exact else PROCESSORS
    if not options.given and not sampling.min_p and not differing(config, defaults):
        return None
    options.check(backbone)
    text = torch.tensor([list(prompt)], device=backbone.device)
    length = len(prompt)
    grammar: GrammarProcessor | LazyGrammarProcessor | None = None
    if isinstance(options.grammar, LazyGrammar):
        grammar = LazyGrammarProcessor(backbone, options.grammar, length)
    elif options.grammar is not None:
        after = ends or sorted(backbone.eos_ids)
        grammar = GrammarProcessor(matcher_of(backbone, options.grammar), length, after)
    arguments = {
        "eos_token_id": ends,
        "pad_token_id": 0,
        **generate_arguments(sampling, options, length, grammar),
    }
    if ends is None:
        arguments["exponential_decay_length_penalty"] = None
    network = backbone.model  # this may build the network, which may raise other errors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a minimum length above the limit
        try:
            processors = network.generate(
                text,
                attention_mask=torch.ones_like(text),
                max_length=length + max_new_tokens,
                max_new_tokens=None,
                use_cache=False,
                cache_implementation=None,
                # The model does not run.
                custom_generate=lambda model, input_ids, logits_processor, **_: logits_processor,
                **arguments,
            )
        except Exception as reason:  # the options are valid, but the config file may not be
            raise _invalid_config(backbone, reason) from reason
    own = len(processors)
    while own and isinstance(processors[own - 1], TRUNCATION):
        own -= 1
    # The sampler applies temperature, top-k and top-p itself, unless another processor follows one of them.
    if not any(isinstance(processor, TRUNCATION) for processor in processors[:own]):
        del processors[own:]
    return SequenceProcessors(processors, text[0], grammar) if processors else None


def check_generation_config(backbone: Backbone) -> None:
    """Logs the settings of the model's generation config; raises UserError if the config is invalid."""
    config = backbone.generation_config
    for sampling in (Sampling(), Sampling("exact", 1.0)):
        processors = sequence_processors(backbone, [0], 1, backbone.eos_ids, sampling, MODELS_OWN)
        # The answer has one token, so the processors for its first and for its last token both run.
        try:
            processors and processors(torch.zeros(backbone.vocab_size))
        except Exception as reason:
            raise _invalid_config(backbone, reason) from reason
    taken = changes_of(backbone)
    left, ignored = (differing(config, names) for names in (CALLERS, NOT_DONE))
    if taken:
        log.info("the model's generation config changes logits: %s", ", ".join(taken))
    if left:
        log.info(
            "the model's generation config suggests %s, which apply only if you set them",
            ", ".join(left),
        )
    if ignored:
        log.warning(
            "the model's generation config sets %s, which is not supported and ignored",
            ", ".join(ignored),
        )


def changes_of(backbone: Backbone) -> list[str]:
    """Returns the fields of the generation config that change logits, with their values."""
    return differing(backbone.generation_config, {**PROCESSORS, **WARPERS})


def differing(config: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a generation config that differ from the defaults, with their values."""
    values = {name: getattr(config, name, None) for name in defaults}
    return [
        f"{name} {shown(value)}"
        for name, value in values.items()
        if value not in (None, defaults[name])
    ]


def _invalid_config(backbone: Backbone, reason: Exception) -> UserError:
    text = f"the generation config of the model {backbone.id!r} is not valid: {first_line(reason)}"
    return UserError(text, "correct its generation_config.json")
