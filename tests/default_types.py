"""Torch's default type, changed for some lines, as vLLM changes it while it loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors without a type of their own be of ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
