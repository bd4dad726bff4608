"""What a bench's document holds beside its figures: the environment, the quality of answers, and passes by rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from medusa_cli import console

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.benchmarks import Result
    from medusa_cli.decoding import Sampling


def beside(backbone: "Backbone", results: "Sequence[Result]", rule: "Sampling", rows: bool) -> dict[str, Any]:
    """Entries for the document; `rows`: time passes by rows too. The quality is asked where answers may differ."""
    from medusa_cli.benchmarks.ceilings import PASSES, measure_rows
    from medusa_cli.benchmarks.environment import environment
    from medusa_cli.benchmarks.quality import likelihood

    found: dict[str, Any] = {"environment": environment(backbone.device)}
    if not rule.greedy:
        found["quality"] = likelihood(backbone, results)
    if rows:
        with console.progress("timing passes", total=PASSES, unit="passes") as bar:
            found["rows"] = measure_rows(backbone, bar.advance)
    return found
