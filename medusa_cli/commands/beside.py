"""What a bench holds beside its figures: environment, quality, passes by rows, and the answers' texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.runs.reading import Document

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.benchmarks import Result
    from medusa_cli.benchmarks.answers import Texts
    from medusa_cli.decoding import Sampling


class Beside:
    """Called with what a bench loaded and measured, gives further entries of its document; keeps the texts.

    rows: time passes by rows too. Quality is asked where the rule lets answers differ from plain decoding's.
    """

    def __init__(self, rule: "Sampling", rows: bool = False) -> None:
        self._rule, self._rows = rule, rows
        self.texts: Texts = {}

    def __call__(self, backbone: "Backbone", results: "Sequence[Result]") -> Document:
        from medusa_cli.benchmarks.answers import texts_of
        from medusa_cli.benchmarks.ceilings import PASSES, measure_rows
        from medusa_cli.benchmarks.environment import environment
        from medusa_cli.benchmarks.quality import likelihood

        self.texts = texts_of(backbone, results)
        found: Document = {"environment": environment(backbone.device)}
        if not self._rule.greedy:
            found["quality"] = likelihood(backbone, results)
        if self._rows:
            with console.progress("timing passes", total=PASSES, unit="passes") as bar:
                found["rows"] = measure_rows(backbone, bar.advance)
        return found
