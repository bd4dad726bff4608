"""Request fields that would change the answer and are not served, with the values that change nothing.

Clients send fields that only other servers know. A field that no request model declares is ignored, and named in the
log and in a header of the response. If a field is in one of these tables and its value would change the answer, the
request is refused, and the refusal names the field.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from medusa_cli.errors import cut

# Returns True if a value changes nothing; receives the value and the object that contains the value.
Check = Callable[[Any, Mapping[str, Any]], bool]
Table = Mapping[str, Check]
# Ignored fields of the current request, in the order in which they were found; None outside of requests.
ignored: ContextVar[dict[str, None] | None] = ContextVar("ignored", default=None)
HEADER = "x-medusa-ignored-fields"
LONGEST_NAME = 60
MAX_NAMES = 30  # in the header of one response
MAX_LOGGED = 300  # clients must not fill the log
log = logging.getLogger(__name__)
_logged = set[str]()


def only(*values: Any) -> Check:
    """Returns a check that accepts only these values; True does not count as 1."""

    def check(value: Any, fields: Mapping[str, Any]) -> bool:
        return any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in values
        )

    return check


def unless_given(field: str) -> Check:
    """Returns a check that accepts any value if another field is given, because that field is used instead."""

    def check(value: Any, fields: Mapping[str, Any]) -> bool:
        return field in fields

    return check


def without(*values: Any) -> Check:
    """Returns a check that accepts lists that contain none of these values."""

    def check(value: Any, fields: Mapping[str, Any]) -> bool:
        return isinstance(value, list) and not any(item in values for item in value)

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
    """Returns True if the penalty window is the whole text, as for all penalties here, or if no penalty is set."""
    given = (fields.get(name) for name in ("repeat_penalty", "repetition_penalty", "rep_pen"))
    others = fields.get("presence_penalty") or fields.get("frequency_penalty")
    return only(-1)(value, fields) or (
        all(penalty in (None, 1) for penalty in given) and not others
    )


def named(check: Check, fields: str) -> dict[str, Check]:
    """Returns the same check for several fields; `fields` are their names, with blanks between."""
    return dict.fromkeys(fields.split(), check)


# Methods of sampling and search, and outputs, that are not served, with the values that switch them off.
UNSERVED = {
    **named(
        only(0),
        "mirostat dry_multiplier xtc_probability dynatemp_range top_a smoothing_factor epsilon_cutoff "
        "eta_cutoff penalty_alpha n_probs",
    ),
    **named(only(0, 1), "min_keep"),
    **named(
        only(1),
        "typical_p typ_p typical tfs_z tfs rep_pen guidance_scale num_beams top_h encoder_repetition_penalty",
    ),
    **named(only(0, -1), "top_n_sigma t_max_predict_ms"),
    **named(only(False), "use_beam_search ban_eos_token"),
    **named(only(True), "spaces_between_special_tokens detokenize"),
    **named(
        only([], ""),
        "logits_processors bad_words banned_strings banned_tokens custom_token_bans negative_prompt "
        "stop_words stop_sequence stop_sequences stop_regex structural_tag",
    ),
    **named(only([], {}), "lora options extra_body sampling_params"),
    **named(without_penalty, "repeat_last_n repetition_penalty_range"),
    "best_of": one_of_each,
}
# Fields that are served, with the values that clients send to leave them unset.
LEFT_OUT = {**named(only(-1), "top_k seed"), "logprobs": only(False)}
REQUEST: Table = {**UNSERVED, **LEFT_OUT}
CHAT: Table = {
    **REQUEST,
    **named(only(-1), "max_tokens max_completion_tokens n_predict max_new_tokens"),
    "functions": only([]),
    "function_call": only("none", "auto"),
    "modalities": among("text"),
}
RESPONSES: Table = {
    **REQUEST,
    **named(only(-1), "max_output_tokens n_predict"),
    **named(only(0), "top_logprobs prompt_logprobs"),
    **named(only(False), "background echo return_token_ids"),
    **named(only(), "previous_response_id conversation prompt"),
    "n": only(1),
    "include": without("message.output_text.logprobs"),
}


def note(fields: Iterable[str]) -> None:
    """Records ignored fields for the response's header, and logs each field once."""
    here = ignored.get()
    for field in fields:
        name = ascii(cut(field, LONGEST_NAME))[1:-1].replace(",", " ")
        if here is not None and len(here) < MAX_NAMES:
            here[name] = None
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            log.info(
                "requests have the field %s, which this server does not use; it is ignored", name
            )
