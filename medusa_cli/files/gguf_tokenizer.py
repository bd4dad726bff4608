"""Tokenizers of GGUF files, and the rules that transformers' reader does not take from the files."""

import json
import logging
from tempfile import TemporaryDirectory
from typing import Any

from medusa_cli.errors import shown
from medusa_cli.files.gguf_header import Header

log = logging.getLogger(__name__)
# The type of those entries in a vocabulary that are not tokens.
UNUSED = 5
# Names of the pre-tokenizers that split texts as GPT-2 does; older files name none.
LIKE_GPT2 = (None, "default", "gpt-2", "gpt2")
# Names of the pre-tokenizers that separate every digit, and split the rest as GPT-2 does.
DIGIT_BY_DIGIT = ("codeshell", "command-r", "exaone", "refact", "smollm", "starcoder")


def own_tokenizer(header: Header, source: dict[str, Any]) -> Any:
    """Returns the tokenizer of a file whose config `gguf_configs` builds.

    source: the arguments with which transformers reads the file.
    """
    from transformers import PreTrainedTokenizerFast, Qwen3_5Tokenizer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(**source)
    if not header.architecture.startswith("qwen35"):
        return tokenizer
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return Qwen3_5Tokenizer.from_pretrained(folder)


def split_digits(header: Header, tokenizer: Any) -> None:
    """Makes a tokenizer split numbers into digits if the file's pre-tokenizer does; transformers' reader ignores this.

    Logs a warning if the file's pre-tokenizer is unknown.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind = header.metadata.get("tokenizer.ggml.pre")
    known = (*DIGIT_BY_DIGIT, *LIKE_GPT2, *GGUF_PRE_TOKENIZER_SPLITS)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2" and kind not in known:
        log.warning(
            f"the file's pre-tokenizer {shown(kind)} is unknown; texts are split as for GPT-2, so some "
            "may get other tokens than the model learned"
        )
    if kind in DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])


def leave_out_unused(header: Header, tokenizer: Any) -> None:
    """Removes the names of ids without a token, such as `[PAD151900]`, so that these ids have no text."""
    types = header.metadata.get("tokenizer.ggml.token_type") or ()
    unused = {id for id, kind in enumerate(types) if kind == UNUSED}
    unused -= set(tokenizer.all_special_ids)
    file = json.loads(tokenizer.backend_tokenizer.to_str()) if unused else {}
    vocabulary = file.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return
    # Names that take part in merges must stay.
    parts = {part for merge in file["model"].get("merges", ()) for part in merge}
    kept = {name: id for name, id in vocabulary.items() if id not in unused or name in parts}
    if len(kept) < len(vocabulary):
        file["model"]["vocab"] = kept
        added = file["added_tokens"]
        file["added_tokens"] = [token for token in added if token["id"] not in unused]
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(file))
