"""Makes any Hugging Face causal LM decode several tokens per step, with the same output."""

# Type checkers take this for typing.TYPE_CHECKING. Importing typing would take time, in which
# Ctrl-C is not handled yet.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from medusa_cli.api import Medusa
else:

    def __getattr__(name):
        """Imports Medusa on first access, because its module imports torch."""
        if name == "Medusa":
            from medusa_cli.api import Medusa

            return Medusa
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.2.0"
__all__ = ["Medusa", "__version__"]
