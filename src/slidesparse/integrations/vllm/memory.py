"""Give the GPU's memory back that weights no longer need while a model is loaded."""

from __future__ import annotations

import torch


def give_blocks_back(device: torch.device) -> None:
    """Return the blocks of tensors that are gone to the GPU.

    vLLM loads a model with ``max_split_size_mb`` of 20 (``v1/worker/gpu_worker.py``), so torch's allocator splits no
    block of more than 20 MiB. But a tensor may take one that is up to 20 MiB larger than itself. A packed weight is a
    little smaller than the dense one of the layer before, and than what its own checks took. It would take all of such
    a block, in a 7B model at 6:8 a third of a gigabyte in all.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
