"""The package's logger, and messages that are worth logging once a process."""

from __future__ import annotations

import logging
from functools import lru_cache

from slidesparse.errors import printable


def escape(record: logging.LogRecord) -> bool:
    """Write out what is not drawn in a message, for all handlers: a filter of every logger of ours."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


LOG = logging.getLogger("slidesparse")
LOG.addFilter(escape)


@lru_cache(maxsize=4096)
def log_once(text: str, level: int = logging.INFO, log: logging.Logger = LOG) -> None:
    """Log a message unless this process has logged it before; a plugin passes a logger that its server shows."""
    log.log(level, text)
