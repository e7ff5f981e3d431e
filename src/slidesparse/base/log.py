"""The package's logger, and messages that a process logs once."""

from __future__ import annotations

import logging
from functools import lru_cache

from slidesparse.errors import printable


def own_logger(name: str) -> logging.Logger:
    """Return a logger that escapes control characters before any handler gets them."""
    log = logging.getLogger(name)
    log.addFilter(_escape)
    return log


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


LOG = own_logger("slidesparse")


@lru_cache(maxsize=4096)
def log_once(text: str, level: int = logging.INFO, log: logging.Logger = LOG) -> None:
    """Log a message unless this process has logged it before; a plugin passes its server's logger."""
    log.log(level, text)
