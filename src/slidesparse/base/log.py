"""The package's logger, and messages that are worth saying once a process."""

from __future__ import annotations

import logging
from functools import lru_cache

LOG = logging.getLogger("slidesparse")


@lru_cache(maxsize=4096)
def log_once(text: str, level: int = logging.INFO) -> None:
    """Log a message unless it was logged before."""
    LOG.log(level, text)
