"""``slidesparse prune``: from a dense checkpoint to a sparse, quantised one, tensor by tensor.

The source may be BF16, FP16 or FP32, a BitNet b1.58 master (BF16, made ternary), or compressed-tensors W8A8 already.
The output is described in :mod:`slidesparse.checkpoints.marker`. Output shards mirror the source's, so that each can be
written, and taken over by a resumed run, on its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.assignment import assign
from slidesparse.base.device import usable_device
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import progress_bar
from slidesparse.base.ranks import ALONE, Ranks
from slidesparse.base.version import __version__
from slidesparse.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from slidesparse.checkpoints.identity import fingerprint
from slidesparse.checkpoints.tensor_names import transformers_loads
from slidesparse.checkpoints.tokenizer_files import lacks_tokenizer, require_fetched
from slidesparse.files.json_files import write_index, write_json
from slidesparse.files.shared_staging import staged_together
from slidesparse.files.source_files import Links, SourceFiles, survey
from slidesparse.files.staging import Workplace, new_folder
from slidesparse.files.stored import Stored
from slidesparse.models.config_keys import MARKER_VERSION
from slidesparse.models.layerwise import SetLoss
from slidesparse.offline.calibrate.calibration import digest
from slidesparse.offline.model_card import FILE_NAME as CARD
from slidesparse.offline.model_card import write_card
from slidesparse.offline.outcome import PruneSummary
from slidesparse.offline.prune_job import PruneJob
from slidesparse.offline.prune_options import PruneOptions, check_options, require_one_process
from slidesparse.pruning import Magnitude
from slidesparse.weights.quant import QUANTISED, dtype_name


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the work begins.

    Attributes:
        checkpoint: The source.
        destination: The folder to make, which does not exist.
        files: Other files of the source.
        job: How every tensor is treated.
        outputs: File name -> tensor -> type and shape, of the new checkpoint.
    """

    checkpoint: Checkpoint
    destination: Path
    files: SourceFiles
    job: PruneJob
    outputs: dict[str, dict[str, Stored]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the new tensors."""
        return sum(stored.n_bytes for shard in self.outputs.values() for stored in shard.values())

    def outcome(self) -> dict[str, Any]:
        """Return the fields of :class:`PruneOutcome` but for the size."""
        job = self.job
        stored = {name: one for shard in self.outputs.values() for name, one in shard.items()}
        quantization = job.config().get("quantization_config") if job.dtype in QUANTISED else None
        return {
            "destination": str(self.destination),
            "dtype": dtype_name(job.dtype),
            "recipe": job.recipe,
            "treated_experts": job.experts.describe(),
            "in_transformers": quantization is None or transformers_loads(job.meta.model, quantization, stored),
            "dense_head": job.dense_head,
            "lacks_tokenizer": lacks_tokenizer(self.files, getattr(job.meta.model, "config", None)),
            "by_size": job.marker is None and isinstance(job.pruner, Magnitude),
            "not_copied": list(self.files.not_copied),
        }


def prepare(
    source: str | Path, destination: str | Path, options: PruneOptions, device: str | torch.device, links: Links
) -> Prepared:
    """Check everything that can be checked before anything is written: see :func:`prune_checkpoint`."""
    check_options(options)
    where = usable_device(device)
    checkpoint = Checkpoint(usable_path(source, "source"))
    destination = new_folder(usable_path(destination, "destination"), checkpoint.path)
    files = survey(checkpoint.path, {"config.json", INDEX_FILE, *checkpoint.shards}, links)
    require_fetched(files)
    job = PruneJob(checkpoint, options, where)
    outputs = {name: job.outputs(shard) for name, shard in checkpoint.shards.items()}
    return Prepared(checkpoint, destination, files, job, outputs)


def job_record(prepared: Prepared, options: PruneOptions) -> dict[str, Any]:
    """Return everything that decides the output: see :mod:`slidesparse.files.staging`."""
    checkpoint, windows = prepared.checkpoint, prepared.job.windows
    record = {
        "version": MARKER_VERSION,
        "slidesparse": __version__,
        "options": {**asdict(options), "smooth": bool(prepared.job.folds)},
        "source": fingerprint(checkpoint, checkpoint.config),
    }
    if windows is None:
        return record
    # Calibration sums in another order on a GPU than on a CPU; without it, all devices give the same bits.
    return {**record, "windows": digest(windows), "device": prepared.job.device.type}


def prune_checkpoint(
    source: str | Path,
    destination: str | Path,
    options: PruneOptions,
    *,
    device: str | torch.device = "cpu",
    links: Links = "refuse",
    progress: bool | None = None,
    ranks: Ranks = ALONE,
) -> PruneSummary:
    """Prune and quantise a checkpoint into a new folder. The source is never touched.

    Several processes write one folder: each prunes and writes some of the shards, and calibrates on some of the
    windows. All of them call this with equal arguments, but for the device; to calibrate it is of one kind.

    Raises:
        CheckpointError: The source cannot be used, or the destination cannot be written.
        InputError: An option or a path cannot be used.
        UnsupportedError: There is no such device here.
    """
    require_one_process(options, ranks.world)
    prepared = prepare(source, destination, options, device, links)
    checkpoint, destination, job = prepared.checkpoint, prepared.destination, prepared.job
    size = prepared.n_bytes
    files, kept_card = prepared.files.set_aside(CARD, "source")
    record = job_record(prepared, options)
    if job.windows is not None:
        job.require_finite(progress)
    with staged_together(ranks, destination, checkpoint.path, record, size + files.n_bytes) as work:
        job.calibrate(work.kept, progress, ranks)
        resumed = _write_shards(prepared, work, ranks, progress)
        summary = _summary(prepared, files, resumed, kept_card)
        if ranks.is_first:
            _write_the_rest(prepared, work, files)
            write_card(work.output, checkpoint.path, summary, options, _method_words(options, job), job.marker is None)
    return summary


def _summary(prepared: Prepared, files: SourceFiles, resumed: list[str], kept_card: str | None) -> PruneSummary:
    job = prepared.job
    losses = job.calibrated.losses if job.calibrated else []
    # FP8 has small numbers next to large ones, so outliers of a token cost its others nothing.
    rounded = losses if job.dtype == torch.int8 else []
    return PruneSummary(
        **prepared.outcome(),
        patterns={name: str(pattern) for name, pattern in job.patterns.items()},
        experts={name: str(pattern) for name, pattern in job.experts.patterns.items()},
        dense=job.dense,
        other=job.targets.other,
        links=list(files.links),
        unexpected=list(job.meta.names.unexpected),
        resumed=resumed,
        source_card=kept_card,
        losses={" ".join(loss.names): loss.loss for loss in losses},
        rounding={" ".join(one.names): one.rounding for one in rounded if one.rounding is not None},
        weight_rounding={" ".join(one.names): one.weights for one in losses if one.weights is not None},
        borrowed=_borrowed(losses),
        source_bytes=prepared.checkpoint.n_bytes,
        destination_bytes=prepared.n_bytes,
    )


def _borrowed(losses: Iterable[SetLoss]) -> dict[str, str]:
    """Return the experts' weights whose inputs are filled up from their layer, fewest tokens first."""
    few = sorted((one for one in losses if one.borrowed), key=lambda one: one.tokens or 0)
    return {one.names[0]: f"{one.tokens} tokens of {(one.tokens or 0) + one.borrowed}" for one in few}


def _write_shards(prepared: Prepared, work: Workplace, ranks: Ranks, progress: bool | None) -> list[str]:
    """Write this process's shards, and return those of all processes that an interrupted run had finished."""
    sizes = {name: sum(one.n_bytes for one in tensors.values()) for name, tensors in prepared.outputs.items()}
    own = assign(sizes, ranks.world)[ranks.rank]
    resumed = []
    with progress_bar("prune", sum(sizes[shard] for shard in own), show=progress) as advance:

        def advance_unless_failed(n_bytes: int) -> None:
            ranks.check()
            advance(n_bytes)

        for shard in own:
            tensors = prepared.outputs[shard]
            if work.is_finished(shard, tensors):
                resumed.append(shard)
                advance_unless_failed(sizes[shard])
            else:
                source = prepared.checkpoint.shards[shard]
                work.finish(
                    shard, prepared.job.write_shard(work.output / shard, source, tensors, advance_unless_failed)
                )
    known = {shard for found in ranks.gather(resumed) for shard in found}
    return [shard for shard in prepared.outputs if shard in known]


def _write_the_rest(prepared: Prepared, work: Workplace, files: SourceFiles) -> None:
    if list(prepared.outputs) != [SINGLE_FILE]:
        write_index(work.output / INDEX_FILE, prepared.outputs, prepared.n_bytes)
    files.copy_to(work.output)
    write_json(work.output / "config.json", prepared.job.config())


def _method_words(options: PruneOptions, job: PruneJob) -> str:
    """Return the method and the text that it saw, without the folder of the text."""
    kept = "" if job.marker is None else "zeros of the source kept"
    if options.calibration is None or job.windows is None:
        return kept or options.method
    samples, length = job.windows.shape
    steps = f" and {options.match} steps of matching a layer" if options.match else ""
    before = f"{kept}, rounded with " if kept else ""
    before += "smoothing and " if job.folds else ""
    return f"{before}{options.method}{steps}, {samples} windows of {length} tokens of {options.calibration.names}"
