"""Downloads folders from the model hub, and uploads folders to it."""

import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.files.catalogue import DEFAULT_MODEL, DEFAULT_SEED
from medusa_cli.files.gguf_header import PART, file_names, is_first

log = logging.getLogger(__name__)
# Seconds after which the hub counts as unreachable. The hub's client would try for some twenty seconds.
PATIENCE = 4
# The HTTP statuses of a hub that is reachable but cannot answer now: too many requests, and server
# errors.
OVERLOADED = (429, *range(500, 600))
# Maximum number of files that an error message lists.
MOST_NAMED = 12


def hub_folder(name: str, patterns: Sequence[str], named: str) -> Path:
    """Returns the folder in the hub's cache that holds those files of a repository that match the patterns.

    New files are downloaded; without a network, the cached files are used. Raises UserError, which names the setting
    `named`, for a repository that is not available.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
    )

    try:
        reachable = _is_reachable(name)
    except HFValidationError as reason:
        fault = f"{named} {name!r} is not a hub id"
        raise UserError(fault, "give OWNER/NAME or a local folder") from reason
    except HfHubHTTPError as reason:
        fault = f"{named} {name!r} was not given by the hub: {first_line(reason)}"
        raise UserError(fault, "check the name, and log in for a private one") from reason
    try:
        return Path(
            snapshot_download(name, allow_patterns=list(patterns), local_files_only=not reachable)
        )
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as reason:
        fault = f"{named} {name!r} is not on this machine and the model hub cannot be reached"
        raise UserError(fault, "check the network, or give a local folder") from reason
    except Exception as reason:
        fault = f"{named} {name!r} could not be downloaded: {first_line(reason)}"
        raise UserError(fault, "run again: what has come is kept") from reason


def _is_reachable(name: str) -> bool:
    """Returns False if the hub cannot be reached or cannot answer now.

    Raises HFValidationError for a name that is no hub id, and HfHubHTTPError if the hub refuses the repository.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, timeout=PATIENCE)
    except HFValidationError:
        raise
    except HfHubHTTPError as reason:
        if reason.response.status_code not in OVERLOADED:
            raise
        return False
    except Exception:  # offline: the client raises its HTTP library's errors
        return False
    return True


@contextmanager
def hub_left_as_it_was() -> Iterator[None]:
    """Lets the hub's client use the network again after a block, if `go_offline_unless_reachable` kept it offline."""
    try:
        yield
    finally:
        if _kept_off:
            from huggingface_hub import constants

            constants.HF_HUB_OFFLINE = False
            _kept_off.clear()
            go_offline_unless_reachable.cache_clear()


# The repositories about which the hub could not be asked.
_kept_off: set[str] = set()


@cache
def go_offline_unless_reachable(name: str) -> None:
    """Restricts the hub's client to its cache from now on, if the hub cannot be asked about a cached repository.

    Otherwise transformers would wait some twenty seconds for each file that the cache lacks.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    with suppress(HfHubHTTPError):  # a hub that refuses a repository is reachable
        if not constants.HF_HUB_OFFLINE and not _is_reachable(name):
            log.warning("the model hub cannot be reached; cached files are used")
            constants.HF_HUB_OFFLINE = True
            _kept_off.add(name)


@cache
def hub_answers(endpoint: str) -> bool:
    """Returns True if the hub answers within PATIENCE seconds, with any status. A process asks the hub only once.

    The client's own limit applies to each address of the hub, so several silent addresses would take longer.
    """
    from huggingface_hub.utils import get_session

    ended = threading.Event()
    statuses: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # the client raises its HTTP library's errors
            statuses.append(get_session().head(endpoint, timeout=PATIENCE).status_code)
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    ended.wait(PATIENCE)
    return bool(statuses)


def names_gguf(name: str) -> bool:
    """Returns True if a name has the form OWNER/NAME:TAG, for a GGUF file in a repository."""
    repository, colon, tag = name.partition(":")
    is_path = repository.startswith((".", "/", "~")) or Path(name).exists()
    return bool(colon and tag) and repository.count("/") == 1 and not is_path


def kept_gguf(name: str) -> Path | None:
    """Returns the GGUF file that OWNER/NAME:TAG names in the hub's cache; None if the file is not there."""
    repository, _, tag = name.partition(":")
    if (folder := _cached_folder(repository)) is None:
        return None
    kept = gguf_files(str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
    files = _of_tag(kept, tag)
    return folder / files[0] if len(files) == 1 else None


@cache
def hub_gguf(name: str) -> Path:
    """Returns the GGUF file that OWNER/NAME:TAG names; downloads the file unless it is in the hub's cache.

    TAG is the end of the file's name, such as Q4_K_M, or the whole name. If a model has several files, all are
    downloaded, and the first is returned. Raises UserError for a repository that is not available, and for a tag that
    matches no file or several.
    """
    from huggingface_hub import snapshot_download

    repository, _, tag = name.partition(":")
    if (kept := kept_gguf(name)) is not None:
        return kept
    try:
        stored = gguf_files(repository_files(repository))
        files = _of_tag(stored, tag)
        if len(files) == 1:
            return (
                Path(snapshot_download(repository, allow_patterns=file_names(files[0]))) / files[0]
            )
    except Exception as reason:  # the client raises its HTTP library's errors
        fault = f"@model {name!r} could not be downloaded: {first_line(reason)}"
        raise UserError(fault, "check the name and the network, or give a GGUF file") from reason
    fault = f"@model {name!r}: {len(files) or 'no'} GGUF files in {repository} end in {tag!r}"
    raise UserError(fault, tags_remedy(repository, stored))


def repository_files(repository: str, kind: str = "model") -> list[str]:
    """Returns the names of a repository's files; without a network, raises the hub client's error within seconds."""
    from huggingface_hub import HfApi

    files = HfApi().repo_info(repository, repo_type=kind, timeout=PATIENCE).siblings or []
    return [file.rfilename for file in files]


def _cached_folder(repository: str) -> Path | None:
    """Returns the folder in the hub's cache that holds some or all files of a repository; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except IncompleteSnapshotError as reason:
        return Path(reason.snapshot_path)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def gguf_files(files: Iterable[str]) -> list[str]:
    """Returns the GGUF files of a repository that stand for a model: whole files, and the first file of split models.

    Files of parts that read images or sound (mmproj) are left out, and so are split models that lack a file.
    """
    stored = set(files)
    return sorted(
        file
        for file in stored
        if file.endswith(".gguf")
        and not file.rpartition("/")[2].startswith("mmproj")
        and (PART.search(file) is None or is_first(file))
        and stored.issuperset(file_names(file))
    )


def tags_remedy(repository: str, files: Sequence[str]) -> str:
    """Returns a remedy that lists a repository's GGUF files as models."""
    if not files:
        return "give a repository with GGUF files that hold a whole model"
    return f"give one of {', '.join(f'{repository}:{file}' for file in files[:MOST_NAMED])}"


def _of_tag(stored: Sequence[str], tag: str) -> list[str]:
    """Returns the file named `tag`; if there is none, the files whose names end in `tag`, not counting part numbers."""
    if tag in stored:
        return [tag]
    end = re.compile(rf"(^|[-_./]){re.escape(tag)}\.gguf$", re.IGNORECASE)
    return [file for file in stored if end.search(PART.sub(".gguf", file))]


def check_push(name: str) -> None:
    """Raises UsageError unless a repository on the hub can have this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        name_is_valid = False
    else:
        name_is_valid = name.count("/") == 1
    if not name_is_valid:
        raise UsageError(f"@push {name!r} is not the name of a repository", "use ORG/NAME")


def push_folder(folder: Path, name: str, private: bool) -> str:
    """Uploads a folder to a repository, which is created if necessary; returns the address of the commit.

    Other files in the repository stay. Raises UserError if the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi, constants

    if "HF_HUB_OFFLINE" not in os.environ:  # the hub may be back since the model was loaded
        constants.HF_HUB_OFFLINE = False
    api = HfApi()
    with _refusals(name):
        api.create_repo(name, private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload with medusa export"
        )
    return str(commit.commit_url)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError as reason:
        fault = f"@push {name}: the hub refused it: {first_line(reason)}"
        remedy = "log in with `hf auth login` or set HF_TOKEN, with the right to write there"
        raise UserError(fault, remedy) from reason
    except OfflineModeIsEnabled as reason:
        raise UserError(f"@push {name}: HF_HUB_OFFLINE is set", "unset it") from reason
    except Exception as reason:  # the client raises its HTTP library's errors
        fault = f"@push {name}: the upload failed: {first_line(reason)}"
        raise UserError(fault, "check the network and HF_ENDPOINT, then run again") from reason


def check_hub(name: str, kind: str = "model", named: str = "@model") -> None:
    """Raises UserError within seconds for a hub id that is neither in the hub's cache nor reachable."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    default = DEFAULT_MODEL if kind == "model" else DEFAULT_SEED
    remedy = f"check the name, give a local path, or use the default {default!r}"
    try:
        file = "config.json" if kind == "model" else "README.md"
        if isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            if kind == "model":
                go_offline_unless_reachable(name)
            return
        if HF_HUB_OFFLINE:
            fault = f"{named} {name!r} is not on this machine and HF_HUB_OFFLINE is set"
            raise UserError(fault, remedy)
        files = repository_files(name, kind)
        if kind == "model" and "config.json" not in files and (stored := gguf_files(files)):
            fault = f"{named} {name!r} holds GGUF files and no config.json"
            raise UserError(fault, tags_remedy(name, stored))
    except HFValidationError as reason:
        fault = f"{named} {name!r} is not a hub id"
        raise UserError(fault, "give OWNER/NAME or a local folder") from reason
    except HfHubHTTPError as reason:
        fault = f"{named} {name!r} was not given by the hub: {first_line(reason)}"
        raise UserError(fault, remedy) from reason
    except UserError:
        raise
    except Exception as reason:  # the hub client raises its HTTP library's errors
        fault = f"{named} {name!r} is not on this machine and the model hub cannot be reached"
        raise UserError(fault, remedy) from reason


def hub_rows(
    name: str,
    named: str,
    prefer: Sequence[str],
    config: str | None = None,
    split: str | None = None,
) -> Iterator[Any]:
    """Yields the rows of one split of a hub dataset.

    The split is the given one, else the first split in `prefer` that exists, else the dataset's first split. Raises
    UserError, which names the setting `named`, for a dataset or a split that does not exist.
    """
    from datasets import load_dataset

    check_hub(name, kind="dataset", named=named)
    try:
        splits = load_dataset(name, config or None, trust_remote_code=False)
    except Exception as reason:  # the library raises its own and its HTTP client's exceptions
        fault = f"{named} {name!r} could not be loaded from the hub: {first_line(reason)}"
        raise UserError(fault, "check the name and its config, or give a file") from reason
    chosen = split or next(key for key in (*prefer, *splits) if key in splits)
    if chosen not in splits:
        fault = f"{named} {name!r}: there is no split {chosen!r}"
        raise UserError(fault, f"use one of {', '.join(splits)}")
    yield from splits[chosen]
