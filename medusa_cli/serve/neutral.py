"""Request fields that do not change the answer here, with the values for which this is true.

Clients send fields that belong to many different servers. A field is accepted but not used if it
cannot change the answer, or if its value changes nothing. A field that would change the answer is
refused by name, like an unknown field.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Returns True if a value changes nothing; receives the value and the object that contains it.
Check = Callable[[Any, Mapping[str, Any]], bool]
Table = Mapping[str, Check]
log = logging.getLogger(__name__)
_noted = set[str]()


def anything(value: Any, fields: Mapping[str, Any]) -> bool:
    return True


def only(*values: Any) -> Check:
    """Returns a check that accepts only these values; True does not count as 1."""

    def check(value: Any, fields: Mapping[str, Any]) -> bool:
        return any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in values
        )

    return check


def unless(field: str) -> Check:
    """Returns a check that accepts any value unless another field is set, without which it has no effect."""

    def check(value: Any, fields: Mapping[str, Any]) -> bool:
        return not fields.get(field)

    return check


def same_as(field: str, *values: Any) -> Check:
    """Returns a check that accepts the value of another field with the same meaning, and these values."""

    def check(value: Any, fields: Mapping[str, Any]) -> bool:
        return (field in fields and fields[field] == value) or only(*values)(value, fields)

    return check


def among(*values: Any) -> Check:
    """Returns a check that accepts lists of only these values."""

    def check(value: Any, fields: Mapping[str, Any]) -> bool:
        return isinstance(value, list) and all(item in values for item in value)

    return check


def one_of_each(value: Any, fields: Mapping[str, Any]) -> bool:
    """Returns True for a `best_of` equal to the number of answers that are returned."""
    return only(fields.get("n") or 1)(value, fields)


def without_penalty(value: Any, fields: Mapping[str, Any]) -> bool:
    """Returns True for a penalty window that covers the whole text, as it does here, or that no penalty uses."""
    given = (fields.get("repeat_penalty"), fields.get("repetition_penalty"))
    others = fields.get("presence_penalty") or fields.get("frequency_penalty")
    return only(-1)(value, fields) or (
        all(penalty in (None, 1) for penalty in given) and not others
    )


def named(check: Check, *fields: str) -> dict[str, Check]:
    return dict.fromkeys(fields, check)


# Fields about the user, billing, caching, routing, queueing and reporting, and hints that the model
# does not receive.
ABOUT_THE_REQUEST = named(
    anything,
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "request_id",
    "id",
    "chat_id",
    "session_id",
    "cache_prompt",
    "id_slot",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "cache_salt",
    "keep_alive",
    "priority",
    "provider",
    "route",
    "models",
    "transforms",
    "usage",
    "return_progress",
    "timings_per_token",
    "guided_decoding_backend",
    "prediction",
    "verbosity",
    "reasoning_effort",
    "reasoning",
    "include_reasoning",
    "reasoning_format",
    "parse_tool_calls",
    "return_tokens_as_token_ids",
)
# Sampling and search methods that are not supported, with the values that switch them off.
SWITCHED_OFF = {
    **named(
        only(0),
        "mirostat",
        "dry_multiplier",
        "xtc_probability",
        "dynatemp_range",
        "top_a",
        "smoothing_factor",
    ),
    **named(
        only(0),
        "epsilon_cutoff",
        "eta_cutoff",
        "penalty_alpha",
        "n_probs",
        "min_keep",
        "n_keep",
        "n_discard",
    ),
    **named(
        only(1),
        "typical_p",
        "typ_p",
        "tfs_z",
        "tfs",
        "length_penalty",
        "guidance_scale",
        "num_beams",
        "top_h",
    ),
    **named(only(1), "encoder_repetition_penalty"),
    **named(only(0, -1), "top_n_sigma"),
    **named(only(False), "use_beam_search", "early_stopping", "ban_eos_token", "penalize_nl"),
    **named(only(True), "spaces_between_special_tokens", "detokenize"),
    **named(
        only([], ""),
        "logits_processors",
        "bad_words",
        "banned_strings",
        "custom_token_bans",
        "negative_prompt",
    ),
    **named(
        only([], {}),
        "mm_processor_kwargs",
        "kv_transfer_params",
        "vllm_xargs",
        "lora",
        "options",
        "extra_body",
    ),
    **named(unless("mirostat"), "mirostat_tau", "mirostat_eta"),
    **named(unless("dry_multiplier"), "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    **named(unless("dry_multiplier"), "dry_sequence_breakers"),
    **named(unless("xtc_probability"), "xtc_threshold"),
    **named(unless("dynatemp_range"), "dynatemp_exponent"),
    **named(unless("smoothing_factor"), "smoothing_curve"),
    "repeat_last_n": without_penalty,
    "best_of": one_of_each,
}
# Fields that are used, with the values that clients send to leave them unset.
LEFT_OUT = {
    **named(only(-1), "top_k", "seed"),
    "logprobs": only(False),
    "repeat_penalty": same_as("repetition_penalty"),
    "n_predict": same_as("max_tokens"),
}
REQUEST: Table = {**ABOUT_THE_REQUEST, **SWITCHED_OFF, **LEFT_OUT}
CHAT: Table = {
    **REQUEST,
    **named(only(-1), "max_tokens", "max_completion_tokens"),
    "n_predict": same_as("max_tokens", -1),
    **named(only([]), "functions", "plugins"),
    **named(only("none", "auto"), "function_call"),
    "modalities": among("text"),
    "thinking": only({"type": "disabled"}),
    "web_search_options": only({}),
}
RESPONSES: Table = {
    **REQUEST,
    **named(anything, "truncation", "max_tool_calls"),
    "background": only(False),
    "top_logprobs": only(0),
    "include": among("reasoning.encrypted_content"),
    "max_output_tokens": only(-1),
}
# Fields that clients, providers and past answers add to messages, their parts, tools and calls.
MARKS: Table = named(
    anything,
    "id",
    "status",
    "phase",
    "index",
    "annotations",
    "logprobs",
    "cache_control",
    "provider_specific_fields",
    "reasoning_details",
    "thinking_blocks",
    "strict",
    "metadata",
)
MESSAGE: Table = {
    **MARKS,
    **named(only([]), "tool_calls", "images"),
    "reasoning": same_as("reasoning_content"),
}
SCHEMA: Table = named(anything, "description", "strict")
STREAM: Table = named(anything, "include_obfuscation")
STRUCTURE: Table = named(
    anything, "disable_fallback", "disable_any_whitespace", "disable_additional_properties"
)


def note(fields: Iterable[str]) -> None:
    """Logs fields of the tables that are accepted but not used, each of them once."""
    for field in fields:
        if field not in _noted:
            _noted.add(field)
            log.info("requests give %s, which changes no answer here and is not used", field)
