"""Whether llama.cpp runs an exported EAGLE-3 folder: its greedy tokens with drafts and without, and how many stand.

Run by the environment of build_llama_cpp: llama_cpp_drafts.py REFERENCE.json FOLDER BUILD
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def main() -> None:
    """Print what was found; exit 1 where drafts change a token."""
    reference = json.loads(Path(sys.argv[1]).read_text())
    drafter, build = Path(sys.argv[2]), Path(sys.argv[3])
    model, draft = build / "model.gguf", build / "eagle3.gguf"
    convert(build, [reference["model"], "--outfile", str(model), "--outtype", "f32"])
    convert(build, [str(drafter), "--target-model-dir", reference["model"], "--outfile", str(draft)])
    plain, _ = answers(build, ["-m", str(model)], reference)
    words = ["-m", str(model), "-md", str(draft), "--spec-type", "draft-eagle3"]
    drafted, timings = answers(build, [*words, "--spec-draft-n-max", str(reference["depth"])], reference)
    same = sum(one == other for one, other in zip(plain, drafted, strict=True))
    counted = {key: sum(one.get(key) or 0 for one in timings) for key in ("draft_n", "draft_n_accepted")}
    report = {
        "questions": len(plain),
        "identical_to_llama_cpp_without_drafts": same,
        "identical_to_our_plain_decoding": sum(
            one == other[: len(one)] for one, other in zip(drafted, reference["tokens"], strict=True)
        ),
        "drafted": counted["draft_n"],
        "accepted": counted["draft_n_accepted"],
        "accepted_by_position_here": reference["accepted"],
    }
    print(json.dumps(report, indent=1))
    sys.exit(same != len(plain) or not counted["draft_n"])


def convert(build: Path, words: list[str]) -> None:
    """Make a GGUF file by llama.cpp's own converter."""
    script = build / "source" / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"
    subprocess.run([sys.executable, str(script), *words], check=True)


def answers(build: Path, words: list[str], reference: dict) -> tuple[list[list[int]], list[dict]]:
    """The tokens of each prompt's greedy answer, and what the server counted, from a server of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(build / "build" / "bin" / "llama-server"), *words, "--port", str(port), "-c", "2048", "-np", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(build / "server.log").open("w"))
    try:
        wait(port, server, build / "server.log")
        longest = max(map(len, reference["tokens"]))
        asked = {"temperature": 0.0, "top_k": 1, "n_predict": longest, "return_tokens": True, "cache_prompt": False}
        found = [post(port, {**asked, "prompt": prompt}) for prompt in reference["prompts"]]
        return [one["tokens"] for one in found], [one.get("timings", {}) for one in found]
    finally:
        server.terminate()
        server.wait()


def wait(port: int, server: subprocess.Popen, log: Path) -> None:
    """Until the server is ready; RuntimeError, with the end of its log, where it ends before."""
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise RuntimeError("llama-server was not ready within five minutes")


def post(port: int, body: dict) -> dict:
    """One completion."""
    url, head = f"http://127.0.0.1:{port}/completion", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    main()
