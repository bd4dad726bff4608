"""Whether vLLM runs an exported folder: its greedy tokens with drafts and without, and how many drafts stand.

Run by vLLM's own environment, where this package is not: vllm_drafts.py REFERENCE.json FOLDER [eagle3|medusa]
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, where its counters can be read


def main() -> None:
    """Print what was found; exit 1 where drafts change a token."""
    from vllm import LLM, SamplingParams

    with open(sys.argv[1], encoding="utf-8") as file:
        reference = json.load(file)
    prompts = [{"prompt_token_ids": prompt} for prompt in reference["prompts"]]
    wanted = SamplingParams(temperature=0.0, max_tokens=max(map(len, reference["tokens"])))
    depth = reference["depth"]
    method = sys.argv[3] if len(sys.argv) > 3 else "eagle3"
    tokens, counts = {}, {}
    for name, drafts in (
        ("plain", None),
        ("drafted", {"method": method, "model": sys.argv[2], "num_speculative_tokens": depth}),
    ):
        engine = LLM(
            reference["model"],
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=1,
            enforce_eager=True,
            disable_log_stats=False,
            speculative_config=drafts,
        )
        # One after another: side by side, sums are made in another order and near-ties flip.
        tokens[name] = [list(engine.generate(one, wanted, use_tqdm=False)[0].outputs[0].token_ids) for one in prompts]
        counts[name] = {one.name: getattr(one, "values", getattr(one, "value", None)) for one in engine.get_metrics()}
        engine.llm_engine.engine_core.shutdown()
        del engine
    found = counts["drafted"]
    steps = found.get("vllm:spec_decode_num_drafts") or 0
    per_position = found.get("vllm:spec_decode_num_accepted_tokens_per_pos") or []
    same = sum(one == other for one, other in zip(tokens["plain"], tokens["drafted"], strict=True))
    ours = sum(one == other for one, other in zip(reference["tokens"], tokens["drafted"], strict=True))
    report = {
        "questions": len(prompts),
        "identical_to_vllm_without_drafts": same,
        "identical_to_our_plain_decoding": ours,
        "steps": steps,
        "accepted_by_position": [round(count / steps, 4) for count in per_position] if steps else None,
        "accepted_by_position_here": reference["accepted"] and [round(one, 4) for one in reference["accepted"]],
    }
    print(json.dumps(report, indent=1))
    sys.exit(same != len(prompts) or not steps)


if __name__ == "__main__":
    main()
