"""Measure a layer of each kind when SGLang loads it, where this machine has no times of it yet, as in vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from slidesparse.gemm import Problem
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.sglang.refusals import SGLangOptions
from slidesparse.tuning.at_load import LoadTuner
from slidesparse.weights.packed import PackedWeight


def make_tuner(options: SGLangOptions, most: int, source: torch.dtype) -> LoadTuner | None:
    """Return what measures the layers of a model; None where the user wants none.

    Args:
        options: The user's options.
        most: Tokens of the largest batch.
        source: Type of the activations.
    """
    return None if options.tune == "off" else LoadTuner(most, source, logging.getLogger(LOGGER))


def measure_first(
    tuner: LoadTuner | None, problem: Problem, options: SGLangOptions, pack: Callable[[], PackedWeight]
) -> None:
    """Measure a layer before its backends are chosen, if it is the first one of a kind without times.

    Args:
        tuner: That of the model.
        problem: The layer.
        options: The user's options.
        pack: Makes its packed weight, which is not kept: a large layer may follow.
    """
    if tuner is not None and tuner.wants(problem, options.backend, options.fallback):
        tuner.measure(problem, pack(), options.fallback)
