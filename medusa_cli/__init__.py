"""Makes any Hugging Face causal LM decode several tokens per step, with the same output."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_cli.api import Medusa

__version__ = "0.1.0"
__all__ = ["Medusa", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports Medusa on first access, because it imports torch."""
    if name == "Medusa":
        from medusa_cli.api import Medusa

        return Medusa
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
