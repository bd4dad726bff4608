"""Export of a drafter in this program's layout: weights, tree and calibration in one folder for `--drafter`."""

import shlex
import shutil
from pathlib import Path

from medusa_cli.export.card import card, shell
from medusa_cli.export.folder import Source, exporting
from medusa_cli.files.io import write_atomic


def export_drafter(
    source: Source, output: Path, *, overwrite: bool = False
) -> tuple[list[str], list[str]]:
    """Writes the drafter with its tree, calibration, adapter and chat template."""
    run = source.run
    drafter = source.name_of(output)
    launch = [shlex.join(["medusa", "chat", "--model", source.model, "--drafter", drafter])]
    with exporting(output, overwrite) as part:
        shutil.copytree(run.drafter_dir, part, dirs_exist_ok=True)
        for file in (run.tree_path, run.calibration_path):
            if file.is_file():
                shutil.copyfile(file, part / file.name)
        if run.adapter is not None:
            shutil.copytree(run.adapter, part / run.adapter_dir.name)
        if run.chat_template is not None:
            write_atomic(part / run.template_path.name, run.chat_template)
        use = [
            f"It drafts up to {source.config.num_heads} tokens, which {source.model} verifies: the answers stay the "
            "model's own. Give this repository's name, or a copy of this folder, as `--drafter`.",
            *shell(["pip install medusa-cli", *launch]),
        ]
        title = f"{source.kind.capitalize()} drafter for {source.model}"
        (part / "README.md").write_text(card(source, title, use), encoding="utf-8")
    return launch, []
