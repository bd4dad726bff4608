"""What a recipe's distill section comes to: the engine's settings, and what one file's conversations share."""

import hashlib
from typing import Any

from medusa_cli.distilling.distilled import Settings
from medusa_cli.distilling.room import MOST
from medusa_cli.errors import UsageError
from medusa_cli.runs.recipe import COLDEST, DistillRecipe


def settings_of(wanted: DistillRecipe, self_talk: bool = False) -> Settings:
    """The engine's settings; UsageError for numbers that cannot be."""
    if 0 < wanted.temperature < COLDEST:
        raise UsageError(f"distill.temperature={wanted.temperature} is too close to 0", "use 0 for greedy")
    return Settings(
        max_new_tokens=wanted.max_new_tokens,
        max_turns=wanted.max_turns,
        temperature=wanted.temperature,
        random_seed=wanted.random_seed,
        batch_size=wanted.batch_size or MOST,
        capacity=wanted.context,
        self_talk=self_talk,
        taps=wanted.taps,
    )


def header_of(wanted: DistillRecipe, self_talk: bool, template: str | None, rounding: str | None) -> dict[str, Any]:
    """What must agree for conversations to share one file."""
    keys = ("max_new_tokens", "max_turns", "temperature", "random_seed")
    settings = {key: getattr(wanted, key) for key in keys}
    # Named where they are used alone, so that files from before them go on.
    extras = {
        "self_talk": self_talk,
        "rounding": rounding,
        "taps": list(wanted.taps),
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16] if template else None,
    }
    return {"seed": wanted.seed, "settings": settings | {key: value for key, value in extras.items() if value}}
