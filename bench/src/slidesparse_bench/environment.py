"""Read the conditions of a record: GPU, driver, versions, commit, clocks. Nothing is set."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path

import torch

from slidesparse.base.device import why_no_cuda
from slidesparse.errors import UnsupportedError
from slidesparse.offline import info
from slidesparse_bench.records import Clocks, Machine

NO_CLOCKS = Clocks(None, None, None)


def require_gpu() -> None:
    """Refuse to measure without a GPU.

    Raises:
        UnsupportedError: When there is none that torch can use, with its reason.
    """
    if (why := why_no_cuda()) is not None:
        remedy = "run it on a machine with an NVIDIA GPU; slidesparse report draws existing records anywhere"
        raise UnsupportedError("slidesparse bench needs a CUDA GPU", got=why, remedy=remedy)


def machine() -> Machine:
    """Return this machine: its current CUDA device and its libraries."""
    properties = torch.cuda.get_device_properties()
    libraries = info.collect()["libraries"]
    return Machine(
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        driver=_query("driver_version"),
        memory_gb=round(properties.total_memory / 1e9, 1),
        l2_mb=round(properties.L2_cache_size / 1e6, 1),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=libraries["triton"],
        cusparselt=libraries["nvidia-cusparselt-cu13"],
        vllm=libraries["vllm"],
        slidesparse=libraries["slidesparse"] or "source tree",
        commit=commit(),
    )


def clocks() -> Clocks:
    """Read the current device's SM clock, power draw and temperature."""
    fields = (_query("clocks.sm,power.draw,temperature.gpu") or ",,").split(",")
    return Clocks(*(_number(field) for field in fields)) if len(fields) == 3 else NO_CLOCKS


def uuids(count: int) -> list[str]:
    """Return the names that NVIDIA's tools have for the first ``count`` CUDA devices."""
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Return the commit of this source tree, with ``+`` when files differ; None outside a git checkout.

    Where only a copy of the tree is measured, ``SLIDESPARSE_COMMIT`` names the commit that was copied.
    """
    if named := os.environ.get("SLIDESPARSE_COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).parent)]
    if _output([*git, "ls-files", "--error-unmatch", __file__]) is None:
        return None  # no checkout, or an installation inside another project's
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{_output([*git, 'rev-parse', '--short=12', 'HEAD'])}{'+' if changed else ''}"


def _query(fields: str) -> str | None:
    # By UUID: nvidia-smi numbers the GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES.
    device = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
    return _output(["nvidia-smi", device, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
