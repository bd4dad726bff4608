"""What every command that decodes begins with: load what was chosen, and say in one line what it is."""

from typing import TYPE_CHECKING, Any

from medusa_cli import console
from medusa_cli.options import called
from medusa_cli.runs.resolve import Choice

if TYPE_CHECKING:
    from medusa_cli.assembly import Assembled


def load(choice: Choice, **place: Any) -> "Assembled":
    """Assemble with a bar for what is timed on the way, and greet; errors as assembly's."""
    from medusa_cli.assembly import assemble

    with console.progress("timing steps", unit="steps") as bar:
        found = assemble(choice, **place, on_progress=bar.advance)
    console.info(called(found.words, place))
    return found
