"""ASYNC (asks the network and waits, within bounds). A Hugging Face id to a folder of its local cache.

The cache first: a model that is there is served without a word to the hub. HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and
HF_TOKEN mean what huggingface_hub says they mean; the token is never looked at here. Only files that cannot run code
are fetched.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replica.errors import ModelLoadError, UnknownModelError
from replica.weight_files import weight_files

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}(@[\w./-]{1,200})?")
#: for the first answer of the hub; beyond it the name does not resolve, or nothing answers
_ANSWER_S = 10.0
WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
#: subfolders hold other forms of the same weights (onnx, original), `consolidated` Mistral's own form
UNWANTED = ("*/*", "consolidated*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NEEDED_FILES = ("config.json", "tokenizer.json")


def is_id(model: str) -> bool:
    """`org/name`, with an optional `@revision` (a branch, a tag or a commit)."""
    return _ID.fullmatch(model) is not None and ".." not in model


def pinned(model: str, folder: Path) -> str:
    """`model` at the commit that `folder` (what `snapshot` gave) holds: every node then takes the same."""
    return f"{model.partition('@')[0]}@{folder.name}"


def snapshot(model: str) -> Path:
    """The cached folder of `org/name[@revision]`, fetched now if need be.

    Raises UnknownModelError where the hub knows no such model and ModelLoadError for everything else that keeps us
    from having it, within seconds unless files are on their way.
    """
    import huggingface_hub

    name, _, revision = model.partition("@")
    cached, why = _cached(name, revision or None)
    if cached is not None:
        return cached
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelLoadError(
            f"model {model!r} {why}, and HF_HUB_OFFLINE forbids to ask the hub; unset it, or {_BY_HAND}"
        )
    info = _asked(model, lambda: huggingface_hub.HfApi().model_info(name, revision=revision or None, timeout=_ANSWER_S))
    _check_files(model, [file.rfilename for file in info.siblings or []])
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=info.sha, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
        )
    except Exception as error:  # of the HTTP library underneath, which changes from version to version
        raise ModelLoadError(f"model {model!r} could not be fetched from the hub: {_first_line(error)}") from error
    return Path(folder)


_BY_HAND = "give a folder that holds the model"


def _cached(name: str, revision: str | None) -> tuple[Path | None, str]:
    """The whole model out of the cache, or None and what is missing."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # not there; or its refs are damaged, and then it is fetched again
        return None, "is not in the local cache"
    if missing := [one for one in NEEDED_FILES if not (folder / one).is_file()]:
        return None, f"is only in part in the local cache ({', '.join(missing)} missing)"
    try:
        weight_files(folder)
    except ModelLoadError as error:
        return None, f"is only in part in the local cache ({error})"
    return folder, ""


def _asked(model: str, ask: Callable[[], Any]) -> Any:
    """What `ask` returns, waiting a bounded time: looking up a name may take minutes where the network is gone."""
    from huggingface_hub import constants, errors

    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(ask())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(_ANSWER_S + 2)
    answer = outcome[0] if outcome else TimeoutError(f"no answer in {_ANSWER_S + 2:g} s")
    if not isinstance(answer, Exception):
        return answer
    where = constants.ENDPOINT
    if isinstance(answer, errors.GatedRepoError):  # before its base, RepositoryNotFoundError
        raise ModelLoadError(
            f"model {model!r} is gated: accept its terms at {where}/{model.partition('@')[0]} and set HF_TOKEN"
        ) from None
    if isinstance(answer, errors.RevisionNotFoundError):
        raise UnknownModelError(f"model {model!r}: the hub has no such revision", param="model") from None
    if isinstance(answer, errors.RepositoryNotFoundError):
        raise UnknownModelError(
            f"model {model!r} is no folder here, and {where} knows none of this name (a private one needs HF_TOKEN)",
            param="model",
        ) from None
    raise ModelLoadError(
        f"model {model!r} is no folder here and not in the local cache, and {where} cannot be reached: "
        f"{_first_line(answer)}; fetch it where there is a network (`hf download {model.partition('@')[0]}`), "
        f"or {_BY_HAND}"
    ) from None


def _check_files(model: str, names: list[str]) -> None:
    """Refuse before gigabytes are fetched what could not be served afterwards."""
    top = [name for name in names if "/" not in name]
    if not any(name.endswith(".safetensors") for name in top):
        if any(name.endswith(".gguf") for name in names):
            raise ModelLoadError(
                f"model {model!r} has only .gguf files; fetch one of them and give its path as the model"
            )
        if any(name.endswith(_PICKLES) for name in names):
            raise ModelLoadError(
                f"model {model!r} has its weights as a pickle only, and reading a pickle can run any code; "
                "take a copy with .safetensors files"
            )
        raise ModelLoadError(f"model {model!r} has no .safetensors file")
    if missing := [name for name in NEEDED_FILES if name not in top]:
        raise ModelLoadError(f"model {model!r} has no {' and no '.join(missing)}, and cannot be served without")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
