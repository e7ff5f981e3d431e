"""Carry out a plan: prune the layers that need a calibration text, then write each shard tensor by tensor.

Output shards mirror the source's, so that each can be written, and taken over by a resumed run, on its own. One weight
is in memory at a time: experts are many, and most of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slidesparse.base.assignment import assign
from slidesparse.base.counted import counted
from slidesparse.base.log import LOG
from slidesparse.base.progress import progress_bar
from slidesparse.base.ranks import Ranks
from slidesparse.checkpoints.check_tensors import check_finite
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.files.staging import Workplace
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.offline.calibrate.layer_store import PrunedLayers, prune_layers_from_disk
from slidesparse.offline.plan import Plan
from slidesparse.offline.source import Source
from slidesparse.offline.storage import TensorJob
from slidesparse.pruning import Linears, get_pruner
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import dequantize, requantize, ternary_scale
from slidesparse.weights.support import check_weight, satisfies


@dataclass(frozen=True)
class Weights:
    """Computes the weights of a new checkpoint, from the source or its smoothed form.

    ``layers`` are those pruned by a calibration text, or None.
    """

    plan: Plan
    checkpoint: Checkpoint
    device: torch.device
    layers: PrunedLayers | None

    def copied(self, tensor: str) -> torch.Tensor:
        """Read a tensor to copy; a CheckpointError for one that is used and holds NaN or Inf."""
        value = self.checkpoint.tensor(tensor)
        if tensor in self.plan.source.meta.names.used:
            check_finite(value, tensor)
        return value

    def stored(self, tensor: str, job: TensorJob, index: int) -> dict[str, torch.Tensor]:
        """Return the new tensors of a weight in a treated tensor, at place ``index``, 0 for a linear."""
        storage, absmean = self.plan.storage, None
        scale = None if storage.source is None else self.checkpoint.tensor(f"{tensor}_scale", self.device)
        changed = self.plan.layers.changed if self.plan.layers is not None else ()
        if job.layer in changed and self.layers is not None:
            weight = self._calibrated(self.layers, tensor, job, index)
        else:
            weight = self._read(tensor, job, index)
            if storage.rounding == "ternary":
                absmean = ternary_scale(weight.cpu()).to(weight.device)  # on the CPU: a sum depends on its order
            if job.pattern != DENSE:
                weight = weight if scale is None else dequantize(weight, scale)
                weight = get_pruner(self.plan.options.method).prune(Linears({tensor: weight}, job.pattern))[tensor]
        if scale is not None:
            return {tensor: weight if job.pattern == DENSE else requantize(weight, scale, storage.dtype)}
        if job.expert is not None and not storage.quantised:
            weight = job.expert.matrix(weight)  # as it was, perhaps transposed
        return storage.tensors(job.becomes[index], weight, job.pattern, absmean)

    def _calibrated(self, layers: PrunedLayers, tensor: str, job: TensorJob, index: int) -> torch.Tensor:
        if self.plan.layers is None or job.expert is None:
            return layers.weight(str(job.layer)).to(self.device)
        return self.plan.layers.experts.part(tensor, index, layers.weight).to(self.device)

    def _read(self, tensor: str, job: TensorJob, index: int) -> torch.Tensor:
        """Read a weight [out, in] onto the device, in its stored type."""
        if len(self.checkpoint.stored(tensor).shape) == 2:
            weight = self.checkpoint.tensor(tensor, self.device)
        else:
            weight = self.checkpoint.part(tensor, index, self.device)
        check_weight(weight, tensor)
        return weight if job.expert is None else job.expert.matrix(weight)


def require_finite(source: Source, progress: bool | None = None) -> None:
    """Refuse NaN and Inf in any used tensor, before a text is cut and hours of calibration."""
    checkpoint = source.checkpoint
    sizes = {name: checkpoint.stored(name).n_bytes for name in sorted(source.meta.names.used)}
    with progress_bar("check", sum(sizes.values()), show=progress) as advance:
        for name, n_bytes in sizes.items():
            check_finite(checkpoint.tensor(name), name)
            advance(n_bytes)


def warn_of_filled(plan: Plan) -> None:
    """Warn of a pruned source whose zeros were filled since, as by a merged adapter: it is pruned anew."""
    checkpoint, filled = plan.source.checkpoint, []
    for tensor, job in ((name, job) for jobs in plan.shards.values() for name, job in jobs.items()):
        if job.pattern != DENSE:
            stored = checkpoint.tensor(tensor)
            parts = stored if stored.dim() == 3 else [stored]
            weights = parts if job.expert is None else map(job.expert.matrix, parts)
            filled += [tensor] * (not all(satisfies(one, job.pattern) for one in weights))
    if filled:
        names, number = ", ".join(filled[:3]), counted(len(filled), "tensor")
        LOG.warning("%s of %s violate its own pattern, and are pruned anew: %s", number, checkpoint.path, names)


def execute(
    plan: Plan, checkpoint: Checkpoint, work: Workplace, device: torch.device, ranks: Ranks, progress: bool | None
) -> tuple[list[str], PrunedLayers | None]:
    """Write this process's shards of a plan; ``checkpoint`` is the source or its smoothed form.

    Returns:
        All processes' shards that an interrupted run had finished, and the layers pruned by calibration.
    """
    layers = None
    if plan.layers is not None:
        layers = prune_layers_from_disk(checkpoint, plan.layers, work.kept, device, progress=progress, ranks=ranks)
    weights = Weights(plan, checkpoint, device, layers)
    outputs = plan.outputs
    sizes = {name: sum(one.n_bytes for one in tensors.values()) for name, tensors in outputs.items()}
    own = assign(sizes, ranks.world)[ranks.rank]
    resumed = []
    with progress_bar("prune", sum(sizes[shard] for shard in own), show=progress) as advance:
        for shard in own:
            if work.is_finished(shard, outputs[shard]):
                resumed.append(shard)
                advance(sizes[shard])
            else:
                digests = write_shard(work.output / shard, plan.shards[shard], weights, advance)
                work.finish(shard, digests)
    known = {shard for shards in ranks.gather(resumed) for shard in shards}
    return [shard for shard in outputs if shard in known], layers


def write_shard(
    path: Path, jobs: Mapping[str, TensorJob], weights: Weights, advance: Callable[[int], None]
) -> dict[str, str]:
    """Write one output shard, and return the digests of its tensors."""
    with TensorWriter(path, {name: one for job in jobs.values() for name, one in job.outputs.items()}) as writer:
        for tensor, job in jobs.items():
            stored = (weights.stored(tensor, job, index) for index in range(len(job.becomes)))
            if job.layer is None:
                writer.write(tensor, weights.copied(tensor))
            elif tensor in job.outputs and len(job.outputs[tensor].shape) == 3:  # experts that still share a tensor
                writer.write_parts(tensor, (one[tensor].cpu() for one in stored))
            else:
                for name, value in ((name, value) for one in stored for name, value in one.items()):
                    writer.write(name, value.cpu())
            advance(sum(one.n_bytes for one in job.outputs.values()))
    return writer.digests
