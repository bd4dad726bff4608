"""Drafters that read several layers: what they make of them, in training and in decoding, from file to chat."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import batch_of
from medusa_cli.drafters import Batch, HydraHeads, NewTokens, load_drafter
from medusa_cli.drafters.layers import Fuse
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import TrainRecipe, load_recipe
from medusa_cli.runs.run import provenance
from medusa_cli.train.losses import drafter_loss
from medusa_cli.train.setup import taps_of
from medusa_cli.tree import Tree
from tests.helpers import FAMILIES, drafted, forward, generate, generate_plain, medusa, save_model, tiny_backbone
from tests.test_joint import records

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [1, 1], [0, 0, 2], [1, 1, 0]])


def deep(family: str = "llama", engine: str = "eager") -> Backbone:
    return tiny_backbone(family, layers=4, engine=engine)


def tapped(backbone: Backbone, prefix: int = 0) -> HydraHeads:
    torch.manual_seed(0)
    heads = HydraHeads.create(backbone, 3, 2, "own", prefix_layers=prefix, taps=(1, 3))
    with torch.no_grad():
        for weight in heads.parameters():  # files hold bf16
            weight.copy_((weight + 0.2 * torch.randn_like(weight)).to(torch.bfloat16))
    return heads.eval()


def test_a_fresh_fuse_gives_the_final_state_and_a_trained_one_adds_what_the_lower_layers_say() -> None:
    torch.manual_seed(0)
    low, middle, final = (scale * torch.randn(5, 8) for scale in (0.1, 30.0, 2.0))
    fuse = Fuse(8, 3)
    assert torch.equal(fuse(torch.cat([low, middle, final], dim=-1)), final)
    torch.nn.init.normal_(fuse.linear.weight)
    unit = [one / one.pow(2).mean(-1, keepdim=True).sqrt() for one in (low, middle)]
    expected = final + torch.cat(unit, dim=-1) @ fuse.linear.weight.T
    assert torch.allclose(fuse(torch.cat([low, middle, final], dim=-1)), expected, atol=1e-3)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tapped_heads_are_lossless(family: str, engine: str, prefix: int) -> None:
    backbone = deep(family, engine)
    prompt = [5, 9, 20, 11, 7]
    steps = generate(backbone, tapped(backbone, prefix), TREE, prompt, max_new_tokens=50, stop_ids=())
    plain = generate_plain(backbone, prompt, max_new_tokens=50, stop_ids=())
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]


@pytest.mark.parametrize("prefix", [0, 1])
def test_decoding_reads_what_training_reads(prefix: int) -> None:
    backbone = deep()
    heads = tapped(backbone, prefix)
    tokens = torch.randint(8, 60, (12,))
    spans = [(4, 12)]
    batch = batch_of(backbone, [Conversation("a", tokens=tokens.tolist(), spans=spans)], taps=heads.taps)
    whole = forward(backbone, tokens, taps=(0, 2, -1), logits="none").hidden
    assert heads.taps == (0, 2, -1) and batch.hidden.shape == (8, 3 * backbone.hidden_size)
    assert torch.allclose(batch.hidden, whole[3:11], atol=1e-4)
    # The prompt of four and then runs of three and two, as decoding settles them.
    heads.truncate(0)
    for first, last in ((0, 4), (4, 7), (7, 9)):
        confirmed = NewTokens(tokens[first:last], whole[first:last], int(tokens[last]), first)
        state = heads._context(confirmed if first else heads.first_input(confirmed))
    embedded = heads.embed(backbone, tokens[9:10])
    trained = next(heads.head_states(backbone, batch, [torch.tensor([5])]))
    assert torch.allclose(heads.blocks[0](torch.cat([state, embedded], dim=-1)), trained, atol=1e-4)


def test_teacher_and_regress_are_of_the_final_states() -> None:
    backbone = deep()
    heads = tapped(backbone).train()
    hidden, following = torch.randn(7, 3 * backbone.hidden_size), torch.randint(0, 64, (7,))
    batch = Batch(hidden, following, torch.zeros(7, dtype=torch.long))
    final = hidden[:, -backbone.hidden_size :]
    fused, embedded = heads.fuse(hidden), heads.embed(backbone, following)
    aim, apart, total = (final @ backbone.lm_head_weight.T).softmax(-1), 0.0, 0.0
    for k in range(1, 4):
        rows = torch.arange(7 - k)
        states = heads.blocks[k - 1](torch.cat([fused[rows], *(embedded[rows + i] for i in range(k))], dim=-1))
        scores = (states @ heads.matrix(backbone, k - 1).T).log_softmax(-1)
        hard = F.nll_loss(scores, following[rows + k])
        total += 0.8**k * (7 - k) / 7 * (0.5 * hard - 0.5 * (aim[rows + k] * scores).sum(-1).mean())
        apart += 0.8**k * (7 - k) / 7 * F.smooth_l1_loss(states, final[rows + k])
    found = drafter_loss(heads, backbone, batch, TrainRecipe(soft=0.5, regress=10.0))
    assert float(found.total.detach()) == pytest.approx(float((total + 10.0 * apart).detach()), rel=1e-4)


def test_a_file_says_which_layers_its_heads_read(tmp_path: Path) -> None:
    backbone = deep()
    heads = tapped(backbone, 1)
    heads.save(tmp_path, provenance(backbone.identity))
    loaded = load_drafter(tmp_path, backbone)
    assert isinstance(loaded, HydraHeads) and loaded.config == heads.config and loaded.taps == (0, 2, -1)
    confirmed = NewTokens(torch.arange(1), torch.randn(1, 3 * backbone.hidden_size), 5, 0)
    ours, theirs = (drafted(d, backbone, confirmed, TREE).tokens for d in (heads, loaded))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("taps", [[0], [4], [3, 1], [2, 2]])
def test_layers_that_the_model_has_not_are_refused(taps: list[int]) -> None:
    recipe = load_recipe(None, ["drafter=hydra", f"drafter.taps={taps}"]).drafter
    with pytest.raises(UsageError, match="does not fit this model's 4 layers"):
        taps_of(recipe, deep())


def test_every_command_takes_a_drafter_that_reads_several_layers(tmp_path: Path) -> None:
    model, folder = save_model(tmp_path / "model", layers=3), tmp_path / "run"
    folder.mkdir()
    lines = [json.dumps({"id": r.id, "tokens": r.tokens, "spans": [list(s) for s in r.spans]}) for r in records(30)]
    (folder / "distill.jsonl").write_text("\n".join(lines) + "\n")
    place = ["--run", str(folder)]
    common = ["train", *place, "--model", model, "--dtype", "fp32", "drafter=hydra", "drafter.num_heads=2"]
    common += ["drafter.vocabulary=own", "train.batch_tokens=96", "train.epochs=1", "drafter.taps=[1,2]"]
    for words in (
        common,
        ["calibrate", *place, "--top", "3"],
        ["tree", *place, "--budget", "4"],
        ["chat", *place, "--prompt", "w1 w2", "--max-new-tokens", "8"],
        [*common, "--stage", "2", "train.lora_rank=4"],
        ["calibrate", *place, "--top", "3"],
        ["chat", *place, "--prompt", "w1 w2", "--max-new-tokens", "8"],
    ):
        done = medusa(*words)
        assert done.exit_code == 0, done.output
    assert json.loads((folder / "drafter" / "config.json").read_text())["taps"] == [1, 2]
    refused = medusa(*common[:-1], "drafter.taps=[3]")
    assert refused.exit_code == 2 and "drafter.taps=[3] does not fit this model's 3 layers" in refused.stderr
    refused = medusa(*common, "drafter=medusa")
    assert refused.exit_code == 2 and "drafter.taps=" in refused.stderr
