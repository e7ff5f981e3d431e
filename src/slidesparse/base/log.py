"""The package's logger, and messages that are worth logging once a process."""

from __future__ import annotations

import logging
from functools import lru_cache

from slidesparse.errors import printable


def _escape(record: logging.LogRecord) -> bool:  # for all handlers
    record.msg, record.args = printable(record.getMessage()), ()
    return True


LOG = logging.getLogger("slidesparse")
for plugin in ("vllm.plugins.", "sglang.srt.plugins.", ""):
    logging.getLogger(f"{plugin}slidesparse").addFilter(_escape)


@lru_cache(maxsize=4096)
def log_once(text: str, level: int = logging.INFO, log: logging.Logger = LOG) -> None:
    """Log a message unless this process has logged it before; a plugin passes a logger that its server shows."""
    log.log(level, text)
