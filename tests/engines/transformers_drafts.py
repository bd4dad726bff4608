"""An exported folder under transformers alone, in fp32: the same tokens as plain `generate` and as our own plain loop.

transformers_drafts.py REFERENCE.json FOLDER
"""

import json
import sys
import time

import torch

sys.modules["medusa_cli"] = None  # what is exported must do without


def main() -> None:
    """Print what was found; exit 1 where drafts change a token."""
    from transformers import AutoModelForCausalLM

    with open(sys.argv[1], encoding="utf-8") as file:
        reference = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
    drafting = {"custom_generate": sys.argv[2], "trust_remote_code": True}
    longest = max(map(len, reference["tokens"]))
    same, ours, counted, seconds = 0, 0, 0, {"plain": 0.0, "drafted": 0.0}
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **drafting)  # read and warm
    for prompt, expected in zip(reference["prompts"], reference["tokens"], strict=True):
        found = {}
        for name, asked in (("plain", {}), ("drafted", drafting)):
            began = time.perf_counter()
            found[name] = model.generate(torch.tensor([prompt]), max_new_tokens=longest, **asked)[0, len(prompt) :]
            seconds[name] += time.perf_counter() - began
        same += torch.equal(found["plain"], found["drafted"])
        ours += found["drafted"].tolist() == expected
        counted += len(found["drafted"])
    rates = {f"{name}_tokens_per_s": round(counted / spent, 2) for name, spent in seconds.items()}
    questions = len(reference["prompts"])
    found = {"questions": questions, "identical_to_generate": same, "identical_to_ours": ours, **rates}
    print(json.dumps({**found, "our_tokens_per_s": reference["our_tokens_per_s"]}, indent=1))
    sys.exit(same != questions)


if __name__ == "__main__":
    main()
