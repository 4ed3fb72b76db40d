"""Pushes the saved model to the Hugging Face Hub when the run has finished. Environment variables ask for it, which the
recipes' options --push_to_hub, --hub_model_id and --hub_private_repo set, and a script of one's own may get."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from faithful.config.keys import on
from faithful.disk.names import printable
from faithful.errors import Refused

ASKED, NAME, PRIVATE = "FAITHFUL_PUSH_TO_HUB", "FAITHFUL_HUB_MODEL_ID", "FAITHFUL_HUB_PRIVATE_REPO"


class NotPushed(Exception):
    """The Hub could not be reached, or has said no. The message is a part of a line."""


def asked() -> bool:
    return on(os.environ.get(ASKED))


def repository(folder: Path) -> str | None:
    """The full name of the repository for a run in `folder`, made if it is not there, or None if none is asked for. The
    main process calls it before training, as transformers' Trainer does. Raises Refused."""
    if not asked():
        return None
    name = os.environ.get(NAME) or folder.absolute().name
    wanted = f"--push_to_hub to {printable(name)}"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise Refused(
            f"{wanted}: HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or leave --push_to_hub out"
        )
    if huggingface_hub.get_token() is None:
        raise Refused(f"{wanted} needs a token of the Hugging Face Hub: `hf auth login`, or set HF_TOKEN")
    private = on(os.environ.get(PRIVATE)) or None  # None: as the owner's settings have it
    try:
        made = reached(lambda: huggingface_hub.create_repo(name, private=private, exist_ok=True))
    except NotPushed as error:
        raise Refused(f"{wanted}: {error}: check --hub_model_id and the token, or leave --push_to_hub out") from None
    return made.repo_id


def push(folder: Path, name: str) -> str:
    """Uploads the files of a saved model. Returns a line about it: a run that has finished does not fail."""
    upload: dict[str, Any] = {"repo_id": name, "folder_path": folder, "ignore_patterns": [".*", "*.tmp"]}
    try:
        done = reached(lambda: huggingface_hub.upload_folder(**upload, commit_message="End of training"))
    except NotPushed as error:
        return f"warning: {folder} was not pushed to {name} ({error}); to push it: hf upload {name} {folder}"
    return f"pushed: {done.commit_url}"


def reached(call: Callable[[], Any]) -> Any:
    """What a call to the Hub returns. Raises NotPushed for all the errors that it can have."""
    try:
        return call()
    except Exception as error:  # the Hub's, or the client's own: a connection, a timeout, a file that has changed
        kind = "" if isinstance(error, HfHubHTTPError | HFValidationError) else f"{type(error).__name__}: "
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise NotPushed(kind + printable(said).rstrip(".:")) from None
