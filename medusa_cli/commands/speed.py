"""Speed and acceptance of an answer, for people and for machines."""

from typing import TYPE_CHECKING

from medusa_cli.runs.reading import Document

if TYPE_CHECKING:
    from medusa_cli.decoding import Stats


def figures(stats: "Stats") -> Document:
    """What --json says of an answer."""
    return {
        "tokens": stats.tokens,
        "seconds": round(stats.seconds, 4),
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "steps": stats.steps,
        "acceptance_rate": round(stats.acceptance_rate, 4),
    }


def status(stats: "Stats") -> str:
    """Speed and acceptance in one line."""
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, {stats.acceptance_rate:.2f} tokens a step "
        f"({stats.steps} steps of {1e3 * stats.step_s:.0f} ms)"
    )
