"""Check whether a device can be used; if not, say why in one line."""

from __future__ import annotations

import torch

from slidesparse.errors import InputError, UnsupportedError, first_line


def why_no_cuda() -> str | None:
    """Return why torch cannot use a CUDA device, in its own words (no GPU, too old a driver, ...); None when it can."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__}: {first_line(error)}"
    return None


def usable_device(device: str | torch.device) -> torch.device:
    """Return a device on which tensors can be made.

    Raises:
        InputError: It is neither ``cpu`` nor ``cuda``.
        UnsupportedError: It is a CUDA device, and torch cannot use one.
    """
    if not isinstance(device, str | torch.device):
        raise InputError("unknown device", got=repr(device), needed="cpu or cuda")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise InputError("unknown device", got=repr(device), needed="cpu or cuda") from error
    if where.type not in ("cpu", "cuda"):
        raise InputError("unknown device", got=repr(device), needed="cpu or cuda")
    if where.type == "cuda" and (why := why_no_cuda()) is not None:
        raise UnsupportedError("no CUDA device here", got=why, remedy="use device='cpu'")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"no device {where} here", needed=f"cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return where
