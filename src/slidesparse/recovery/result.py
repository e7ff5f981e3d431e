"""Result of a run: a checkpoint with the tensors, types and other files of the pruned one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from slidesparse.base.traced_tensor import Origin, replay, sources
from slidesparse.base.whole_file import replace_file
from slidesparse.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.errors import UnsupportedError
from slidesparse.files.json_files import write_index, write_json
from slidesparse.files.source_files import SourceFiles, without_code
from slidesparse.files.staging import Workplace
from slidesparse.files.stored import STORED_NAMES
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.offline.model_card import FILE_NAME, SERVE

RECORD = "recover.json"
"""Record of a run in its result: options and figures (docs/formats.md)."""

TYPES = {name: dtype for dtype, name in STORED_NAMES.items()}


@torch.no_grad()
def round_as_stored(parameters: Mapping[str, torch.nn.Parameter], meta: MetaModel, checkpoint: Checkpoint) -> None:
    """Round parameters in place to the types in which :func:`gathered` writes them, so that these are evaluated."""
    for name, one in parameters.items():
        origin = meta.names.origins[name]
        kind, *others = {TYPES[checkpoint.stored(source).dtype] for source in sources(origin)}
        value = one.to(kind)
        if others:  # experts of several types in one parameter
            stored = gathered({name: one}, meta, checkpoint, keep=True)
            value = replay(origin, {source: part.float() for source, part in stored.items()}.__getitem__).to(one.device)
            if isinstance(one, DTensor):
                value = distribute_tensor(value, one.device_mesh, one.placements, src_data_rank=None)
        one.copy_(value)


def gathered(
    parameters: Mapping[str, torch.nn.Parameter], meta: MetaModel, checkpoint: Checkpoint, keep: bool
) -> dict[str, torch.Tensor]:
    """Return the trained tensors of the pruned checkpoint, on the CPU and in its types.

    All processes take part; those that do not ``keep`` the result get nothing. ``meta`` has the places of parameters in
    the checkpoint.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        value = parameter.detach()
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
        if keep:
            tensors |= _as_stored(whole, meta.names.origins[name], checkpoint)
    for name, other in meta.names.tied.items():  # a checkpoint may hold both all the same
        own, shared = (meta.names.origins.get(one, one) for one in (name, other))
        if isinstance(own, str) and isinstance(shared, str) and own in checkpoint.files and shared in tensors:
            tensors[own] = tensors[shared]
    return tensors


def _as_stored(value: torch.Tensor, origin: Origin, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors from which a parameter was made, with its new values: the inverse of ``replay``.

    transformers stacks, splits and joins tensors of experts. Replayed on the indices of elements, that gives the place
    of each element.
    """
    stored = {name: checkpoint.stored(name) for name in sources(origin)}
    if isinstance(origin, str):
        return {origin: value.to(TYPES[stored[origin].dtype])}
    indices: dict[str, torch.Tensor] = {}
    start = 0
    for name, one in stored.items():
        end = start + one.n_bytes // TYPES[one.dtype].itemsize
        indices[name], start = torch.arange(start, end).view(one.shape), end
    places = replay(origin, indices.__getitem__)
    flat = torch.full((start,), torch.nan)
    flat[places.flatten()] = value.float().flatten()
    if bool(flat.isnan().any()) or places.shape != value.shape:
        got = f"only a part of {', '.join(stored)} in the model"
        raise UnsupportedError("cannot store a trained parameter as it was", got=got)
    return {name: flat[indices[name]].to(TYPES[one.dtype]) for name, one in stored.items()}


def write_result(
    work: Workplace, checkpoint: Checkpoint, files: SourceFiles, trained: Mapping[str, torch.Tensor], record: Any
) -> None:
    """Write a result into the working folder: the pruned checkpoint with new values of the ``trained`` tensors.

    ``record`` is the content of ``recover.json``.
    """
    for shard, tensors in checkpoint.shards.items():
        with TensorWriter(work.output / shard, tensors) as writer:
            for name in tensors:
                writer.write(name, trained[name] if name in trained else checkpoint.tensor(name))
    if list(checkpoint.shards) != [SINGLE_FILE]:
        write_index(work.output / INDEX_FILE, checkpoint.shards, checkpoint.n_bytes)
    files.copy_to(work.output)
    write_json(work.output / "config.json", without_code(checkpoint.config))
    write_json(work.output / RECORD, record)
    if trained and (card := work.output / FILE_NAME).is_file():
        kl = "{:.4f} -> {:.4f}".format(*(record[when]["kl"] for when in ("before", "after")))
        line = f"`slidesparse recover` trained it on {record['tokens']} tokens: KL from dense {kl} nats.\n\n"
        before, heading, after = card.read_bytes().partition(SERVE.encode())
        replace_file(card, before + line.encode() + heading + after)
