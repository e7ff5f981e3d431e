"""The user's cache folder, which keeps searches and measurements of this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/slidesparse``; ``~/.cache`` without the variable; without a home, a temporary folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slidesparse"
    except RuntimeError:  # a container under an arbitrary user
        return Path(tempfile.gettempdir()) / f"slidesparse-{os.getuid()}"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, and a crash leaves one of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
