"""``slidesparse prune --dry-run``: what would be done, what it would take, and nothing done."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.readable_size import readable_size
from slidesparse.errors import CheckpointError
from slidesparse.files.dry_staging import bytes_to_write
from slidesparse.files.source_files import Links
from slidesparse.files.tokenizer_files import NO_TOKENIZER
from slidesparse.files.write_errors import innermost_folder, require_space
from slidesparse.offline.cards import warn_of_type
from slidesparse.offline.plan.plan_file import StoredPlan
from slidesparse.offline.prune import Prepared, plan_of, prepare, what_readers_do, what_rounding_gives
from slidesparse.offline.prune_job import PruneJob
from slidesparse.offline.prune_options import PruneOptions, Recipe
from slidesparse.offline.prune_time import PruneTime, estimate_time
from slidesparse.weights.quant import dtype_name, parse_dtype


@dataclass(frozen=True)
class Tensors:
    """How many tensors share a fate, and how large they are.

    Attributes:
        count: Tensors; for layers, layers.
        source_bytes: In the source.
        destination_bytes: In the new checkpoint, scales included.
    """

    count: int
    source_bytes: int
    destination_bytes: int


@dataclass(frozen=True)
class DryRun:
    """What pruning would do.

    Attributes:
        destination: The folder that would be made.
        dtype: Type of the treated weights.
        recipe: How INT8 weights would be rounded.
        treated: Pattern -> the linears that would get it.
        experts: Pattern -> the tensors of experts that would get it.
        treated_experts: Lines that describe them.
        in_transformers: Whether transformers will read them.
        dense_head: The output embedding, where it would follow a pattern and vLLM runs it dense; else None.
        left: Reason -> the layers that would be left alone for it.
        others: Everything else that would be copied: embeddings, norms, biases.
        files: Other files that would be copied, and their bytes.
        lacks_tokenizer: Whether the model takes text, and the source has no tokenizer to copy.
        not_copied: Files that hold other weights, and would be left out.
        destination_bytes: The new checkpoint with its other files.
        free_bytes: Free on the disk of the destination.
        refused: What the run would say of a disk that is too small; None where it is not.
        time: An estimate.
    """

    destination: str
    dtype: str
    recipe: Recipe
    treated: dict[str, Tensors]
    experts: dict[str, Tensors]
    treated_experts: list[str]
    in_transformers: bool
    dense_head: str | None
    left: dict[str, Tensors]
    others: Tensors
    files: Tensors
    lacks_tokenizer: bool
    not_copied: list[str]
    destination_bytes: int
    free_bytes: int
    refused: str | None
    time: PruneTime

    @property
    def fits(self) -> bool:
        """Whether the disk has the space."""
        return self.refused is None

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and whether the disk has the space."""
        return {**asdict(self), "fits": self.fits}

    def describe(self) -> str:
        """Return it as text."""
        lines = ["dry run: nothing was written"]
        lines += [f"would treat {_line(what, 'linears')} at {pattern}" for pattern, what in self.treated.items()]
        for pattern, what in self.experts.items():
            lines.append(f"would treat {_line(what, 'tensors of experts')} at {pattern}")
        lines += [f"experts: {line}" for line in self.treated_experts]
        lines += what_rounding_gives(self.recipe, [*self.treated, *self.experts])
        lines += what_readers_do(bool(self.experts), self.in_transformers, self.dense_head)
        lines += [f"would leave {_line(what, 'layers')}: {reason}" for reason, what in self.left.items()]
        lines.append(f"would copy {_line(self.others, 'other tensors')}, and {_line(self.files, 'other files')}")
        lines += [f"would not copy, they hold other weights: {', '.join(self.not_copied)}"] if self.not_copied else []
        lines += [NO_TOKENIZER] if self.lacks_tokenizer else []
        size, free = readable_size(self.destination_bytes), readable_size(self.free_bytes)
        lines.append(f"{size} in {self.destination}, {free} free")
        lines += [f"would be REFUSED: {self.refused}"] if self.refused is not None else []
        lines.append(f"about {_duration(self.time.seconds)} of computing: {self.time.basis}")
        warning = warn_of_type(parse_dtype(self.dtype))
        return "\n".join(lines if warning is None else [*lines, warning])


def dry_run(
    source: str | Path,
    destination: str | Path,
    options: PruneOptions,
    *,
    device: str | torch.device = "cpu",
    links: Links = "refuse",
    followed: StoredPlan | None = None,
) -> DryRun:
    """Return what :func:`slidesparse.offline.prune.prune_checkpoint` would do; it has the same arguments and errors.

    A disk that is too small is no error here, since the sizes are what one wants to know then.
    """
    prepared = prepare(source, destination, options, device, links, followed)
    size = prepared.n_bytes + prepared.files.n_bytes
    missing = bytes_to_write(prepared.destination, lambda: plan_of(prepared, options), size)
    job, files = prepared.job, prepared.files
    treated = {job.layer_of[tensor]: tensor for tensor in job.layer_of}
    left, experts = job.left, _experts(job)
    weights = {name: job.experts.stored(name) for name in job.experts.dense}
    for name in left.keys() - weights.keys():
        origins = job.meta.names.origins
        if isinstance(tensor := origins.get(f"{name}.weight", origins.get(name)), str):
            weights[name] = [tensor]
    known = {name for names in ([*treated.values()], *weights.values(), *experts.values()) for name in names}
    counts = Counter(map(str, job.patterns.values()))
    return DryRun(
        destination=str(prepared.destination),
        dtype=dtype_name(job.dtype),
        recipe=options.recipe,
        treated={
            pattern: _tensors(prepared, [treated[name] for name, p in job.patterns.items() if str(p) == pattern], count)
            for pattern, count in counts.most_common()
        },
        experts={pattern: _tensors(prepared, names) for pattern, names in experts.items()},
        treated_experts=job.experts.describe(),
        in_transformers=job.experts.in_transformers,
        dense_head=job.dense_head,
        left={
            reason: _tensors(prepared, [t for name in weights if left[name] == reason for t in weights[name]], count)
            for reason, count in Counter(left.values()).most_common()
        },
        others=_tensors(prepared, [tensor for tensor in prepared.checkpoint.files if tensor not in known]),
        files=Tensors(len(files.copied), files.n_bytes, files.n_bytes),
        lacks_tokenizer=prepared.lacks_tokenizer,
        not_copied=list(files.not_copied),
        destination_bytes=size,
        free_bytes=shutil.disk_usage(innermost_folder(prepared.destination)).free,
        refused=_refusal(prepared.destination, missing),
        time=estimate_time(job) if job.patterns else PruneTime(0.0, "nothing is treated"),
    )


def _experts(job: PruneJob) -> dict[str, list[str]]:
    """Return pattern -> tensors of the source with experts that get it."""
    found: dict[str, list[str]] = {}
    for name, tensor in job.experts.tensors.items():
        if tensor.layer in job.experts.patterns:
            found.setdefault(str(job.experts.patterns[tensor.layer]), []).append(name)
    return found


def _tensors(prepared: Prepared, names: list[str], count: int | None = None) -> Tensors:
    """Return how large tensors of the source are, there and in the new checkpoint; each counts once."""
    names = list(dict.fromkeys(names))
    stored = {name: one for shard in prepared.outputs.values() for name, one in shard.items()}
    become = [part for name in names for part in prepared.job.stored_as(name, prepared.checkpoint.stored(name))]
    new = [name for name in (*become, *(f"{name}_scale" for name in names)) if name in stored]
    return Tensors(
        len(names) if count is None else count,
        sum(prepared.checkpoint.stored(name).n_bytes for name in names),
        sum(stored[name].n_bytes for name in dict.fromkeys(new)),
    )


def _refusal(destination: Path, n_bytes: int) -> str | None:
    """Return what the run would say of the space for some bytes."""
    try:
        require_space(destination, n_bytes)
    except CheckpointError as error:
        return str(error)
    return None


def _line(what: Tensors, kind: str) -> str:
    sizes = dict.fromkeys((readable_size(what.source_bytes), readable_size(what.destination_bytes)))
    return f"{what.count} {kind if what.count != 1 else kind.removesuffix('s')}, {' -> '.join(sizes)}"


def _duration(seconds: float) -> str:
    """Return a time in a unit in which it is a small number.

    >>> _duration(0.2), _duration(44), _duration(5400)
    ('1 s', '44 s', '1.5 h')
    """
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
