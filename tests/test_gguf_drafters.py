"""Drafters of models in GGUF files: MTP layers in the file itself, and Gemma 4's assistants beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from medusa_cli.drafters import NewTokens, load_drafter
from medusa_cli.drafters.mtp import checkpoint_tensors
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.mtp_layer import own_drafter
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import (
    forward,
    generate,
    generate_plain,
    medusa,
    medusa_json,
    save_network,
    tokens_of,
)
from tests.test_companions import (
    CHAIN,
    ROOT,
    Reference,
    check_drafts,
    check_identity,
    known,
    mtp_by_hand,
    mtp_by_transformers,
    save_assistant,
    save_with_mtp,
    talks,
)
from tests.test_gguf import VOCAB, Weights, write_gemma4, write_glm4_moe, write_qwen35

FP32 = LoadOptions(dtype="fp32")
WRITERS: dict[str, Callable[..., Any]] = {
    "qwen3_5_text": write_qwen35,
    "qwen3_5_moe_text": write_qwen35,
    "glm4_moe": write_glm4_moe,
}
EACH_KIND = pytest.mark.parametrize("kind", WRITERS)
# The converter's names of the parts around the layer.
PARTS = {
    "fc": "eh_proj",
    "embedding_norm": "enorm",
    "state_norm": "hnorm",
    "norm": "shared_head.norm",
}
LAYER = "model.layers.4"


class Written(NamedTuple):
    """A model with an MTP layer as safetensors, and that layer's weights by the converter's names."""

    path: str
    later: Weights
    kind: str

    def write(self, file: Path, kind: Kind = Kind.F32, **changed: torch.Tensor | None) -> str:
        """Writes the model as a GGUF file; returns its path. changed: parts of the layer, None for one left out."""
        later = self.later | {
            f"{LAYER}.{name.replace('__', '.')}.weight": x for name, x in changed.items()
        }
        network = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        kept = {name: tensor for name, tensor in later.items() if tensor is not None}
        WRITERS[self.kind](file, kind, network=network, later=kept)
        return str(file)


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Returns, for a model type, a model with an MTP layer."""
    folder = tmp_path_factory.mktemp("mtp")

    def of_kind(kind: str) -> Written:
        path = str(folder / kind)
        if not Path(path).exists():
            save_with_mtp(kind, Path(path), vocab_size=VOCAB)
        later = {}
        for name, tensor in checkpoint_tensors(ModelSource.of(path)).items():
            part, _, end = name.removeprefix("mtp.").rpartition(".")
            own = PARTS.get(part) or part.removeprefix("layer.")
            later[f"{LAYER}.{own}.{end}"] = tensor
        return Written(path, later, kind)

    return of_kind


@pytest.mark.slow
@EACH_KIND
@pytest.mark.usefixtures("exact")
def test_an_mtp_layer_in_a_gguf_file_drafts_as_that_of_the_checkpoint(
    tmp_path: Path, with_mtp: Callable[[str], Written], kind: str
) -> None:
    written = with_mtp(kind)
    path = written.write(tmp_path / "tiny.gguf")
    expected = checkpoint_tensors(ModelSource.of(written.path))
    tensors = checkpoint_tensors(ModelSource.of(path))
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():  # a file's gains are rounded, as 1 + w
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6)
    backbone = load_backbone(path, FP32)
    assert backbone.engine.name == "native"
    drafter = load_drafter(own_drafter(ModelSource.of(path)), backbone)
    new = known(backbone, 1)
    reference: Reference
    if kind == "qwen3_5_text":
        reference = mtp_by_hand(written.path, kind, backbone, new)
    elif kind == "glm4_moe":
        reference = mtp_by_transformers(written.path, backbone, new)
    else:
        other = load_drafter(own_drafter(ModelSource.of(written.path)), backbone)
        reference = by_drafter(other, backbone, new)
    check_drafts(drafter, backbone, new, reference)


def by_drafter(drafter: Any, backbone: Any, new: Any) -> Reference:
    """Returns another drafter's scores, by its own drafts of chains."""

    def scores(path: Sequence[int]) -> torch.Tensor:
        fork = drafter.fork()
        caches = [fork.caches[0]]
        embedded = fork.embed(backbone, torch.tensor([*new.following.tolist()]))
        states = fork.extend(new.hidden, [range(new.end)], caches, embedded)
        for depth, token in enumerate(path):
            embedded = fork.embed(backbone, torch.tensor([token]))
            states = fork.extend(states[-1:], [[new.end + depth]], caches, embedded)
        return backbone.lm_head_weight @ states[-1]

    return scores


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_decoding_with_the_mtp_layer_of_a_gguf_file_is_plain_decoding(
    tmp_path: Path, with_mtp: Callable[[str], Written], kind: str
) -> None:
    check_identity(with_mtp(kind).write(tmp_path / "tiny.gguf", Kind.Q8_0), "mtp")


@pytest.mark.slow
def test_an_mtp_layer_of_a_gguf_file_gets_a_draft_vocabulary_a_calibration_and_a_tree(
    tmp_path: Path, with_mtp: Callable[[str], Written]
) -> None:
    path = with_mtp("qwen3_5_text").write(tmp_path / "tiny.gguf", Kind.Q8_0)
    backbone = load_backbone(path, FP32)
    data = talks(tmp_path, backbone)
    run = f"{tmp_path}/run"
    medusa("import", "mtp", "--run", run, "--model", path, "--data", data, "--draft-vocab-size", 40)
    drafter = load_drafter(Path(run) / "drafter", backbone)
    assert drafter.config.draft_vocab_size == 40
    medusa("calibrate", "--run", run, "--data", data, "--dtype", "fp32", "--top", "4")
    medusa("tree", "--run", run, "--budget", "auto")
    options = ("--dtype", "fp32", "--raw", "--max-new-tokens", "24", "--prompt", "ab")
    plain = medusa_json("chat", "--model", path, "--baseline", *options)
    drafted = medusa_json("chat", "--run", run, *options)
    assert drafted["answer"] == plain["answer"]


@pytest.mark.slow
def test_a_gguf_file_with_an_mtp_layer_is_told_of_it(
    tmp_path: Path, with_mtp: Callable[[str], Written]
) -> None:
    written = with_mtp("qwen3_5_text")
    path = written.write(tmp_path / "tiny.gguf")
    words = ("chat", "--raw", "--prompt", "ab", "--max-new-tokens", "2", "--model")
    assert "--drafter mtp" in medusa(*words, path, exit_code=None).stderr
    bare = tmp_path / "bare.gguf"
    write_qwen35(bare, Kind.F32)
    assert "--drafter mtp" not in medusa(*words, bare, exit_code=None).stderr
    done = medusa(*words, bare, "--drafter", "mtp", exit_code=1)
    assert str(bare) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.quick("glm4_moe")
@EACH_KIND
def test_an_mtp_layer_without_its_norm_has_the_models_own(
    tmp_path: Path, with_mtp: Callable[[str], Written], kind: str
) -> None:
    written = with_mtp(kind)
    copies = {"embed_tokens": torch.zeros(VOCAB, 64), "shared_head__head": torch.zeros(VOCAB, 64)}
    path = written.write(tmp_path / "tiny.gguf", shared_head__norm=None, **copies)
    backbone = load_backbone(path, FP32)
    drafter = load_drafter(own_drafter(ModelSource.of(path)), backbone)
    network = AutoModelForCausalLM.from_pretrained(written.path, dtype=torch.float32)
    torch.testing.assert_close(
        drafter.mtp.norm.weight, network.model.norm.weight, rtol=0, atol=1e-6
    )


@pytest.mark.quick("change3-blk.4.ssm_out")
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"eh_proj": None}, "blk.4.nextn.eh_proj"),
        ({"self_attn__q_proj": None}, "blk.4.attn_q"),
        ({"enorm": torch.ones(32)}, "blk.4.nextn.enorm"),
        ({"linear_attn__out_proj": torch.ones(64, 64)}, "blk.4.ssm_out"),
    ],
)
def test_a_part_of_an_mtp_layer_is_refused_in_one_line(
    tmp_path: Path, with_mtp: Callable[[str], Written], change: dict[str, Any], part: str
) -> None:
    path = with_mtp("qwen3_5_text").write(tmp_path / "tiny.gguf", **change)
    with pytest.raises(UserError, match=part) as raised:
        checkpoint_tensors(ModelSource.of(path))
    assert path in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    load_backbone(path, FP32)  # the model itself is whole


def test_a_file_with_an_mtp_layer_alone_is_named(
    tmp_path: Path, with_mtp: Callable[[str], Written]
) -> None:
    path = Path(with_mtp("qwen3_5_text").write(tmp_path / "tiny.gguf"))
    path.write_bytes(
        path.read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.~~~~_norm.weight")
    )
    with pytest.raises(UserError, match="MTP") as raised:
        load_backbone(str(path), FP32)
    assert str(path) in str(raised.value)
    assert raised.value.remedy


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_an_assistant_beside_a_gguf_file_of_gemma_drafts_as_beside_the_checkpoint(
    tmp_path: Path,
) -> None:
    network = write_gemma4(tmp_path / "tiny.gguf", Kind.Q8_0)
    folder = save_assistant(network, tmp_path / "assistant")
    whole = save_network(network, tmp_path / "whole")
    text = [5 + 7 * i % 50 for i in range(40)]  # longer than a window
    drafts = []
    for path in (str(tmp_path / "tiny.gguf"), whole):
        backbone = load_backbone(path, FP32)
        assert backbone.engine.name == "native"
        drafter = load_drafter(Path(folder), backbone)
        cache = backbone.engine.new_cache()
        hidden = forward(backbone, text, cache, logits="none").hidden.clone()
        new = NewTokens(torch.tensor(text), hidden, ROOT, 0, cache=cache)
        drafts.append(drafter.draft(backbone, [drafter], [new], CHAIN)[0].tokens.tolist())
        plain = tokens_of(generate_plain(backbone, text, max_new_tokens=16, stop_ids=()))
        steps = generate(backbone, drafter, CHAIN, text, max_new_tokens=16, stop_ids=())
        assert tokens_of(steps) == plain
    assert drafts[0] == drafts[1]
