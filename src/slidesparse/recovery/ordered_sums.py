"""Deterministic kernels, so that a run that was killed and resumed has the bytes of an uninterrupted one.

``warn_only`` is no middle way: PyTorch then computes the gradients of attention with kernels that are not deterministic
(``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, and ``sdp_utils.cpp`` for cuDNN's).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slidesparse.base.log import LOG
from slidesparse.errors import first_line
from slidesparse.recovery.networks import DenseNetwork


@contextmanager
def ordered_sums(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels on a GPU for a block; those of a CPU always are."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # all of it is written before it is read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill


def choose_kernels(dense: DenseNetwork, ids: torch.Tensor, alone: bool) -> None:
    """Allow other kernels, with a warning, where an operator of the model has no deterministic one.

    One pass over a few tokens, int64 [windows, window], shows that. Several processes promise no equal bytes, so a
    process that is not ``alone`` allows them at once.
    """
    lenient, embedding = not alone, dense.model.get_input_embeddings().weight
    if alone:
        try:
            embedding.requires_grad_(True)  # so that gradients run through every layer
            dense.predictions(ids).hidden.float().sum().backward()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            LOG.warning("a killed and resumed run may end with other bytes: %s", first_line(error))
            lenient = True
        embedding.requires_grad_(False)
        embedding.grad = None
    torch.use_deterministic_algorithms(True, warn_only=lenient)
