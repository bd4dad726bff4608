"""`medusa import`: imports a drafter that another tool trained, into a run."""

from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError
from medusa_cli.files import mtp_layer
from medusa_cli.files.model_source import ModelSource
from medusa_cli.options import OutputFlags, flag, refuse
from medusa_cli.runs.load_options import LoadOptions

_DATA = (
    "With mtp: a file of conversations. The layer then scores only their most frequent tokens. "
    "[default: the run's conversations; if it has none, the layer scores all tokens]"
)
_SIZE = "With mtp and conversations: the number of tokens that the layer scores. [default: 12288]"


def import_(
    *,
    place: Annotated[
        str,
        typer.Argument(
            metavar="PATH|ID",
            help="A folder, a file of weights or a hub id that holds Medusa heads (in the format of FasterDecoding, "
            "vLLM or TGI), Hydra heads, or an EAGLE-3 drafter (also in speculators' format). "
            "mtp: the MTP layer in the checkpoint of --model.",
        ),
    ],
    run: options.RunOrNew = None,
    model: options.ModelOfDrafter = None,
    data: Annotated[Path | None, flag("--data FILE", _DATA, dir_okay=False)] = None,
    draft_vocab_size: Annotated[int | None, flag("--draft-vocab-size N", _SIZE, min=1)] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    printing: OutputFlags,
) -> None:
    """Import a drafter that was trained elsewhere, or exported by `medusa export` as medusa, eagle3 or speculators.

    Every tensor is checked against the model's sizes before anything is written, and nothing in the files is executed.
    After the import, calibrate the run. The other commands accept the run as --run, like any other run.
    """
    printing.configure()
    own = place == mtp_layer.NAME and not Path(place).exists()
    if own and model is None:
        raise UsageError("mtp is in a model's checkpoint", "give its --model")
    if not own:
        given = {"--data": data, "--draft-vocab-size": draft_vocab_size}
        refuse(given, f"has no effect on {place}", "leave it out")
    from medusa_cli.export.importing import import_drafter, import_mtp

    if own and model is not None:
        loading = LoadOptions(trust_remote_code=trust_remote_code)
        source = ModelSource.of(model)
        target, facts, notes = import_mtp(run, source, data, draft_vocab_size, loading)
    else:
        target, facts, notes = import_drafter(place, run, model, trust_remote_code)
    for note in notes:
        console.warn(note)
    if printing.json:
        console.emit_json({"run": str(target.path), **facts, "notes": notes})
        return
    console.result(
        f"{target.drafter_dir}: a {facts['drafter']} drafter of {facts['heads']} heads (from the {facts['format']} "
        f"layout). Next: medusa calibrate --run {target.argument} --data CONVERSATIONS.jsonl"
    )
