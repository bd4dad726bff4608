"""Runs an exported folder in another engine: its greedy tokens with drafts must equal those without.

check.py hf|vllm|llama-cpp REFERENCE.json FOLDER [BUILD], in the environment of that engine, where this package is not.
BUILD: the folder of build_llama_cpp. Prints one JSON document; exits with 1 if drafts change a token or never come.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Tokens = list[list[int]]
# Tokens without drafts, tokens with drafts, and further facts; "drafts" is 0 if the engine never drafted.
Result = tuple[Tokens, Tokens, dict[str, Any]]


def check_hf(reference: dict, folder: str) -> Result:
    """Runs transformers in fp32."""
    sys.modules["medusa_cli"] = None  # type: ignore[assignment]  # the folder must do without
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafting = {"custom_generate": folder, "trust_remote_code": True}
    longest = max(map(len, reference["tokens"]))
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **drafting)  # warm-up
    tokens: dict[str, Tokens] = {}
    facts: dict[str, Any] = {"drafts": 1, "our_tokens_per_s": reference["our_tokens_per_s"]}
    for name, settings in (("plain", {}), ("drafted", drafting)):
        start = time.perf_counter()
        answers = [
            model.generate(torch.tensor([p]), max_new_tokens=longest, **settings)
            for p in reference["prompts"]
        ]
        seconds = time.perf_counter() - start
        pairs = zip(reference["prompts"], answers, strict=True)
        tokens[name] = [answer[0, len(prompt) :].tolist() for prompt, answer in pairs]
        facts[f"{name}_tokens_per_s"] = round(sum(map(len, tokens[name])) / seconds, 2)
    return tokens["plain"], tokens["drafted"], facts


def check_vllm(reference: dict, folder: str) -> Result:
    """Runs vLLM in fp32 on a CPU; the folder's config tells Medusa heads from EAGLE-3."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # In this process, where its counters can be read.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in reference["prompts"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=max(map(len, reference["tokens"])))
    method = "medusa" if (Path(folder) / "medusa_lm_head.safetensors").is_file() else "eagle3"
    drafting = {"method": method, "model": folder, "num_speculative_tokens": reference["depth"]}
    tokens, counts = {}, {}
    for name, settings in (("plain", None), ("drafted", drafting)):
        engine = LLM(
            reference["model"],
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=1,
            enforce_eager=True,
            disable_log_stats=False,
            speculative_config=settings,
        )
        # One after another: side by side, sums are made in another order and near-ties flip.
        outputs = [
            engine.generate(prompt, sampling, use_tqdm=False)[0].outputs[0] for prompt in prompts
        ]
        tokens[name] = [list(output.token_ids) for output in outputs]
        counts[name] = {
            m.name: getattr(m, "values", getattr(m, "value", None)) for m in engine.get_metrics()
        }
        engine.llm_engine.engine_core.shutdown()
        del engine
    steps = counts["drafted"].get("vllm:spec_decode_num_drafts") or 0
    accepted = counts["drafted"].get("vllm:spec_decode_num_accepted_tokens_per_pos") or []
    facts = {
        "drafts": steps,
        "accepted_by_position": [round(count / steps, 4) for count in accepted] if steps else [],
    }
    return tokens["plain"], tokens["drafted"], facts


def check_llama_cpp(reference: dict, folder: str, build: Path) -> Result:
    """Runs llama.cpp's server on converted files."""
    model, draft = build / "model.gguf", build / "eagle3.gguf"
    converter = [
        sys.executable,
        str(build / "source" / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"),
    ]
    subprocess.run(
        [*converter, reference["model"], "--outfile", str(model), "--outtype", "f32"], check=True
    )
    subprocess.run(
        [*converter, folder, "--target-model-dir", reference["model"], "--outfile", str(draft)],
        check=True,
    )
    plain, _ = llama_cpp_answers(build, ["-m", str(model)], reference)
    words = ["-m", str(model), "-md", str(draft), "--spec-type", "draft-eagle3"]
    drafted, timings = llama_cpp_answers(
        build, [*words, "--spec-draft-n-max", str(reference["depth"])], reference
    )
    drafts, accepted = (
        sum(timing.get(key) or 0 for timing in timings) for key in ("draft_n", "draft_n_accepted")
    )
    return plain, drafted, {"drafts": drafts, "accepted": accepted}


def llama_cpp_answers(build: Path, words: list[str], reference: dict) -> tuple[Tokens, list[dict]]:
    """Returns the tokens of each prompt's greedy answer, and the server's counts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(build / "build" / "bin" / "llama-server"),
        *words,
        "--port",
        str(port),
        "-c",
        "2048",
        "-np",
        "1",
    ]
    log, url = build / "server.log", f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise RuntimeError(
                    f"llama-server ended with {server.returncode}: {log.read_text()[-2000:]}"
                )
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        longest, answers = max(map(len, reference["tokens"])), []
        settings = {
            "temperature": 0.0,
            "top_k": 1,
            "n_predict": longest,
            "return_tokens": True,
            "cache_prompt": False,
        }
        for prompt in reference["prompts"]:
            body = json.dumps({**settings, "prompt": prompt}).encode()
            request = urllib.request.Request(
                f"{url}/completion", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=600) as answer:
                answers.append(json.load(answer))
        return [answer["tokens"] for answer in answers], [
            answer.get("timings", {}) for answer in answers
        ]
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    engine, path, folder, *build = sys.argv[1:]
    reference = json.loads(Path(path).read_text(encoding="utf-8"))
    check = {"hf": check_hf, "vllm": check_vllm, "llama-cpp": check_llama_cpp}[engine]
    plain, drafted, facts = check(reference, folder, *map(Path, build))
    same = sum(a == b for a, b in zip(plain, drafted, strict=True))
    ours = sum(a == b[: len(a)] for a, b in zip(drafted, reference["tokens"], strict=True))
    report = {
        "questions": len(plain),
        "identical_without_drafts": same,
        "identical_to_our_plain_decoding": ours,
    }
    print(
        json.dumps(
            {**report, **facts, "accepted_by_position_here": reference["accepted"]}, indent=1
        )
    )
    sys.exit(same != len(plain) or not facts["drafts"])


if __name__ == "__main__":
    main()
