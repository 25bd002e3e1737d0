"""PURE. A JSON object out of a file that came from somewhere: bounded in size and depth, every failure a sentence."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from replica.errors import ModelLoadError

_MAX_DEPTH = 64


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """The object in `path`. Raises ModelLoadError for a file that is missing, too large, too deep or something else."""
    check_file(path, max_bytes)
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise ModelLoadError(f"{path} is nested too deep") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # UnicodeDecodeError and numbers with too many digits as well
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object but {type(value).__name__}")
    if _depth(value) > _MAX_DEPTH:
        raise ModelLoadError(f"{path} is nested too deep; at most {_MAX_DEPTH} levels are allowed")
    return value


def check_file(path: Path, max_bytes: int) -> None:
    """Before it is opened: a FIFO would be waited for. Raises ModelLoadError for a file that is missing, too large or
    something else.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ModelLoadError(f"{path} is no regular file")
    if found.st_size > max_bytes:
        raise ModelLoadError(f"{path} has {found.st_size} bytes; at most {max_bytes} are allowed")


def _depth(value: Any) -> int:
    """Levels of objects and lists. Walks level by level, so that the depth itself cannot overflow the stack."""
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            break
        level = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, dict | list)
        ]
    return depth
