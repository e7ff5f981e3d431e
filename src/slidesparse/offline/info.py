"""``slidesparse info``: the libraries, GPUs and usable backends of this machine, and the measured cards."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from slidesparse.base.device import why_no_cuda
from slidesparse.base.progress import table, wrapped
from slidesparse.gemm import BACKENDS, Problem, cards, get_backend
from slidesparse.weights.pattern import Pattern

LIBRARIES = ("slidesparse", "torch", "triton", "nvidia-cusparselt-cu13", "transformers", "compressed-tensors", "vllm")


def collect() -> dict[str, Any]:
    """Return versions, GPUs, cards, and for each backend why it cannot run an INT8 6:8 layer here (None: it can).

    The cards are the same on every machine: see :mod:`slidesparse.gemm.cards`.
    """
    why = why_no_cuda()
    device = torch.device("cuda" if why is None else "cpu")
    problem = Problem(Pattern(6, 8), torch.int8, out_features=4096, in_features=4096, device=device, bits=6)  # for all
    return {
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if why is None else [],
        "why_no_gpu": why,
        "backends": {name: get_backend(name).why_not(problem) for name in BACKENDS},
        "cards": [card.to_json() for card in cards.CARDS],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "measured": cards.describe_measurement(properties.name),
    }


def describe(info: dict[str, Any]) -> str:
    """Return the result of :func:`collect` as text."""
    lines = [f"python      {info['python']}"]
    lines += [f"{name:<24}{version or 'not installed'}" for name, version in info["libraries"].items()]
    for gpu in info["gpus"]:
        lines += [f"GPU         {gpu['name']}, sm {gpu['capability']}, {gpu['memory_gb']} GB"]
        lines += [f"            measured {gpu['measured']}"]
    lines += [] if info["gpus"] else [f"GPU         none: {info['why_no_gpu']}"]
    lines += [f"backend     {name}: {why or 'can run here'}" for name, why in info["backends"].items()]
    lines = [wrapped(line) for line in lines]
    known = "who has measured them; ampere ran on an H200 alone, in INT8 with the reference's bits (docs/cards.md)"
    lines += ["", wrapped(f"Sparse backends that have kernels for a card, and {known}:")]
    return "\n".join([*lines, table(cards.COLUMNS, cards.table())])
