"""The package's logger, and messages that are worth logging once a process."""

from __future__ import annotations

import logging
from functools import lru_cache

from slidesparse.errors import printable


def named_log(name: str) -> logging.Logger:
    """Return the logger of a name, each of whose messages is one line that a terminal only draws."""
    log = logging.getLogger(name)
    log.addFilter(_escape)
    return log


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


LOG = named_log("slidesparse")


@lru_cache(maxsize=4096)
def log_once(text: str, level: int = logging.INFO, log: logging.Logger = LOG) -> None:
    """Log a message unless this process has logged it before; a plugin passes a logger that its server shows."""
    log.log(level, text)
