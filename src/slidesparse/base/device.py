"""Devices: whether one can be used, the reason if not, and the driver's version."""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

from slidesparse.base.arguments import shown
from slidesparse.errors import InputError, UnsupportedError, first_line


def why_no_cuda() -> str | None:
    """Return torch's reason for not using a CUDA device (no GPU, too old a driver, ...); None if it can."""
    try:
        torch.cuda.init()
    except AssertionError:
        return f"torch {torch.__version__} is a build for CPUs"
    except RuntimeError as error:
        return f"torch {torch.__version__}: {first_line(error)}"
    return None


@lru_cache(maxsize=64)
def runs_triton(device: torch.device) -> bool:
    """Return whether Triton runs on a device: from compute capability 8.0 on."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return a device on which tensors can be made; a CUDA device without a number is the current one.

    None: a GPU when there is one, else the CPU.

    Safetensors takes ``cuda`` for the first GPU, not the current one, and does not know ``cpu:0``.

    Raises:
        InputError: It is neither ``cpu`` nor ``cuda``, or a second CPU.
        UnsupportedError: It is a CUDA device, and torch cannot use one.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    named = str(device) if isinstance(device, torch.device) else device
    unknown = InputError("unknown device", got=shown(named), needed="cpu or cuda")
    if not isinstance(device, str | torch.device):
        raise unknown
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise unknown from error
    if where.type not in ("cpu", "cuda") or (where.type == "cpu" and where.index):
        raise unknown
    if where.type == "cpu":
        return torch.device("cpu")
    if (why := why_no_cuda()) is not None:
        raise UnsupportedError("no CUDA device here", got=why, remedy="use the device cpu")
    if (where.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"no device {where} here", needed=f"cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", torch.cuda.current_device()) if where.index is None else where


def give_blocks_back(device: torch.device) -> None:
    """Return the freed blocks of torch's allocator to the GPU, while a server loads a model.

    A packed weight is a little smaller than the dense one of the layer before, and than what its own checks took.
    Torch's allocator would put it into such a block, whose rest is too small for another: in a 7B model at 6:8 a third
    of a gigabyte in all. With the ``max_split_size_mb`` of 20 by which vLLM loads (``v1/worker/gpu_worker.py``) it
    splits no block of more than 20 MiB, but takes whole ones that are up to 20 MiB too large.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def mostly_free(device: torch.device) -> bool:
    """Return whether three quarters of a GPU's memory are free now."""
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 1)
    return 4 * free >= 3 * total


@lru_cache(maxsize=1)
def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, ``580.159.04``; None if unknown."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    version = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return None if version is None else version[0]
