"""State rows are tied to the conversation they were kept for: others under it are found, not learnt."""

import json
from pathlib import Path

import pytest
import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.distill import Outcome, Records, answer_locally
from medusa_cli.distill.distillation import merge_parts, part_of
from medusa_cli.errors import UserError
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.run import Run
from medusa_cli.train import load_dataset
from tests.helpers import tiny_backbone


def distilled(run: Run) -> list[Outcome]:
    seeds = [Conversation.from_turns(f"s{i}", [f"w{i} w{i + 1}"]) for i in range(6)]
    backbone = tiny_backbone()
    samples = list(answer_locally(backbone, seeds, DistillRecipe(max_new_tokens=8, batch_size=2, context=64)))
    writer = Records(run, backbone.hidden_size, {})
    for sample in samples:
        writer.write(sample.conversation, sample.states)
    writer.close()
    return samples


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(f"{tmp_path}/run", create=True)


def edit(path: Path, number: int, **changes: object) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_whole_rows_are_learnt_from_and_a_changed_byte_is_found(run: Run) -> None:
    samples = distilled(run)
    assert load_dataset(run, tiny_backbone()).report.read == len(samples)
    damaged = bytearray(run.states_path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    run.states_path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"states\.bin holds other state rows .*delete it"):
        load_dataset(run, tiny_backbone())
    run.states_path.unlink()  # the remedy: they are computed again
    assert load_dataset(run, tiny_backbone()).report.read == len(samples)


def test_rows_of_another_conversation_are_found(run: Run) -> None:
    distilled(run)
    lines = [json.loads(line) for line in run.distill_path.read_text().splitlines()]
    first = next(i for i, one in enumerate(lines[1:], 1) if one["state_rows"][1] == lines[0]["state_rows"][1])
    edit(run.distill_path, first, state_rows=lines[0]["state_rows"])
    with pytest.raises(UserError, match=f"for the conversation '{lines[first]['id']}'"):
        load_dataset(run, tiny_backbone())


def test_a_damaged_part_of_several_processes_is_asked_again(run: Run) -> None:
    samples, backbone = distilled(Run.open(f"{run.path}/other", create=True)), tiny_backbone()
    part = Records(part_of(run, 0), backbone.hidden_size, {})
    for sample in samples[:3]:
        part.write(sample.conversation, sample.states)
    part.states.truncate(0)
    part.states.append(torch.zeros(sum(len(one.states) for one in samples[:3]), backbone.hidden_size))
    part.write(samples[3].conversation, samples[3].states)
    part.close()
    whole = Records(run, backbone.hidden_size, {})
    merge_parts(run, whole)
    assert whole.done == {samples[3].conversation.id}
    whole.close()
