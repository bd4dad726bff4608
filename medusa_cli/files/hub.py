"""Downloads of folders from the model hub, and uploads to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from medusa_cli.errors import UsageError, UserError, first_line

# Seconds after which the hub counts as unreachable; its client would try for some twenty seconds.
PATIENCE = 4


def hub_folder(name: str, patterns: Sequence[str], named: str) -> Path:
    """Returns the folder in the hub's cache that holds a repository's files with these patterns.

    New files are downloaded; without a network, the cached files are used. Raises UserError, with the setting `named`,
    for a repository that is not available.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
    )

    reachable = True
    try:
        HfApi().repo_info(name, timeout=PATIENCE)
    except HFValidationError as reason:
        raise UserError(
            f"{named} {name!r} is no hub id", "give OWNER/NAME or a local folder"
        ) from reason
    except HfHubHTTPError as reason:
        fault = f"{named} {name!r} was not given by the hub: {first_line(reason)}"
        raise UserError(fault, "check the name, and log in for a private one") from reason
    except Exception:  # offline: the client raises its HTTP library's errors
        reachable = False
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
        raise UsageError(f"@push {name!r} is no name of a repository", "use ORG/NAME")


def push_folder(folder: Path, name: str, private: bool) -> str:
    """Uploads a folder to a repository, which is created if necessary; returns the address of the commit.

    Files with other names stay in the repository. Raises UserError if the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

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
