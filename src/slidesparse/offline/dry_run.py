"""``slidesparse prune --dry-run``: the plan and its sizes, and nothing done."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.readable_size import readable_size
from slidesparse.errors import CheckpointError
from slidesparse.files.source_files import Links
from slidesparse.files.staging import bytes_to_write
from slidesparse.files.write_errors import innermost_folder, require_space
from slidesparse.models.layer_kinds import alike
from slidesparse.offline.estimate import describe_seconds, estimate_seconds
from slidesparse.offline.outcome import PruneOutcome
from slidesparse.offline.prune import prepare
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.weights.pattern import DENSE


@dataclass(frozen=True)
class Tensors:
    """Number of tensors or layers treated alike, and their bytes in the source and, with scales, in the result."""

    count: int
    source_bytes: int
    destination_bytes: int

    def describe(self, kind: str) -> str:
        """Return the number and the sizes in words; ``kind`` is a plural."""
        sizes = dict.fromkeys((readable_size(self.source_bytes), readable_size(self.destination_bytes)))
        return f"{self.count} {kind if self.count != 1 else kind.removesuffix('s')}, {' -> '.join(sizes)}"


@dataclass(frozen=True, kw_only=True)
class DryRun(PruneOutcome):
    """The outcome of a dry run.

    Attributes:
        treated: Pattern -> its linears.
        experts: Pattern -> its tensors of experts.
        left: Reason -> the layers left alone for it.
        others: All other copied tensors: embeddings, norms, biases.
        files: Other copied files, and their bytes.
        free_bytes: Free on the disk of the destination.
        refused: Error of a run whose disk is too small; else None.
        seconds: Estimated time of calibration on the device; None without calibration.
    """

    treated: dict[str, Tensors]
    experts: dict[str, Tensors]
    left: dict[str, Tensors]
    others: Tensors
    files: Tensors
    free_bytes: int
    refused: str | None
    seconds: float | None

    @property
    def fits(self) -> bool:
        """Whether the disk has the space."""
        return self.refused is None

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and whether the disk has the space."""
        return {**asdict(self), "fits": self.fits}

    def describe(self) -> str:
        """Return the dry run as text."""
        lines = ["dry run: nothing was written"]
        time = "" if self.seconds is None else f": {describe_seconds(self.seconds)}, if nothing else runs here"
        prunes = any(pattern != str(DENSE) for pattern in (*self.treated, *self.experts))
        lines.append(f"would {'prune' if prunes else 'round'} by {self.calibrated or self.method}{time}")
        lines += [f"would treat {what.describe('linears')} at {pattern}" for pattern, what in self.treated.items()]
        for pattern, what in self.experts.items():
            lines.append(f"would treat {what.describe('tensors of experts')} at {pattern}")
        lines += [f"experts: {line}" for line in self.treated_experts]
        lines += [f"would leave {what.describe('layers')}: {reason}" for reason, what in self.left.items()]
        lines.append(f"would copy {self.others.describe('other tensors')}, and {self.files.describe('other files')}")
        lines += [f"would not copy, other weights or code: {', '.join(self.not_copied)}"] if self.not_copied else []
        size, free = readable_size(self.destination_bytes), readable_size(self.free_bytes)
        lines.append(f"{size} in {self.destination}, {free} free")
        lines += [f"would be REFUSED: {self.refused}"] if self.refused is not None else []
        return "\n".join([*lines, *self._on_use([*self.treated, *self.experts])])


def dry_run(
    source: str | Path,
    destination: str | Path,
    options: PruneOptions,
    *,
    device: str | torch.device = "cpu",
    links: Links = "refuse",
) -> DryRun:
    """Plan :func:`slidesparse.offline.prune.prune_checkpoint`, with the same arguments and errors, and write nothing.

    A disk that is too small is no error here, but noted in the result.
    """
    prepared = prepare(source, destination, options, device, links)
    made, files = prepared.plan, prepared.files
    size = prepared.n_bytes + files.n_bytes
    missing = bytes_to_write(prepared.destination, prepared.record, size)
    jobs = {tensor: job for shard in made.shards.values() for tensor, job in shard.items()}
    linears = {name: str(made.patterns[name]) for name in made.treated.linears.linears}
    experts = {tensor: str(job.pattern) for tensor, job in jobs.items() if job.expert is not None}
    left = {**made.treated.dense, **made.treated.linears.other}
    tensors_of = {name: made.source.tensors(name) for name in (*linears, *left)} | {name: [name] for name in experts}
    known = {tensor for names in tensors_of.values() for tensor in names}

    def sizes(names: Iterable[str], count: int | None = None) -> Tensors:
        """Return the bytes of tensors of the source, there and in the new checkpoint; each counts once."""
        names = list(dict.fromkeys(names))
        here = sum(made.source.checkpoint.stored(name).n_bytes for name in names)
        there = sum(one.n_bytes for name in names for one in jobs[name].outputs.values())
        return Tensors(len(names) if count is None else count, here, there)

    def grouped(labels: Mapping[str, str]) -> dict[str, Tensors]:
        """Group layers by label, the most common first."""
        return {
            labels[group[0]]: sizes((tensor for name in group for tensor in tensors_of[name]), len(group))
            for group in sorted(alike(labels, labels.__getitem__), key=len, reverse=True)
        }

    refused = None
    try:
        require_space(prepared.destination, missing)
    except CheckpointError as error:
        refused = str(error)
    return DryRun(
        **prepared.outcome(),
        treated=grouped(linears),
        experts=grouped(experts),
        left=grouped(left),
        others=sizes(tensor for tensor in jobs if tensor not in known),
        files=Tensors(len(files.copied), files.n_bytes, files.n_bytes),
        destination_bytes=size,
        free_bytes=shutil.disk_usage(innermost_folder(prepared.destination)).free,
        refused=refused,
        seconds=estimate_seconds(made, prepared.device),
    )
