"""Hash the package's sources, for the key under which vLLM keeps compiled graphs.

A compiled graph holds our operators, their arguments as text, and whatever our passes made of it. Nearly every file has
a part in that, so all of them count: a key that changes too often costs one compilation, a stale graph wrong results.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2]

SUFFIXES = (".cu", ".cuh", ".json", ".py")
"""Files that decide what runs: Python, the CUDA kernel, and tables."""


@lru_cache(maxsize=8)
def hash_sources(folder: Path = PACKAGE) -> str:
    """Return a SHA-256 of the names and contents of all sources in a folder; read once a process."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
