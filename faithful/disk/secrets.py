"""Keeps secrets out of files that are shared: what an option like `--hub_token` was given, passwords in URLs, and keys
of the usual services, which begin as only they do."""

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "***"
# Names of options. Not pad_token, max_new_tokens and others of a tokenizer.
SECRET = re.compile(
    r"((hub|hf|hugging_?face(_hub)?|api|access|auth|use_auth|bearer|refresh|wandb|trackio|github|gitlab)_)?token"
    r"|(.*_)?(api_?key|secret|secret_key|access_key|private_key|password|passwd|passphrase|credentials?)",
    re.IGNORECASE,
)
PASSWORD = re.compile(r"(\w://[^\s/:@]*):[^\s/@]+@")
KEYS = re.compile(
    r"\b(hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abpr]-[\w-]{10,})"
)


def is_secret(name: object) -> bool:
    return bool(SECRET.fullmatch(str(name).lstrip("-").replace("-", "_")))


def hidden(value: Any) -> Any:
    """A value for JSON in which secrets are replaced."""
    if isinstance(value, str):
        return KEYS.sub(HIDDEN, PASSWORD.sub(rf"\1:{HIDDEN}@", value))
    if isinstance(value, list):
        return [hidden(inner) for inner in value]
    if isinstance(value, dict):
        secret = {key for key, inner in value.items() if inner and isinstance(inner, str) and is_secret(key)}
        return {key: HIDDEN if key in secret else hidden(inner) for key, inner in value.items()}
    return value


def hidden_in_words(words: Iterable[str]) -> list[str]:
    """A command line in which what follows the name of a secret is replaced: `--token X`, `--token=X`, `TOKEN=X`."""
    kept, before = [], ""
    for word in words:
        name, equals, _ = word.partition("=")
        if before.startswith("--") and "=" not in before and is_secret(before) and not word.startswith("--"):
            kept.append(HIDDEN)
        else:
            kept.append(f"{name}={HIDDEN}" if equals and is_secret(name) else word)
        before = word
    return kept
