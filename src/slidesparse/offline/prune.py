"""``slidesparse prune``: from a dense checkpoint to a sparse, quantised one, tensor by tensor.

The source may be BF16, FP16 or FP32, a BitNet b1.58 master (BF16, made ternary), or compressed-tensors W8A8 already.
The output is described in :mod:`slidesparse.checkpoints.marker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.device import usable_device
from slidesparse.base.log import LOG
from slidesparse.base.paths import usable_path
from slidesparse.base.ranks import ALONE, Ranks
from slidesparse.base.version import __version__
from slidesparse.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from slidesparse.checkpoints.identity import fingerprint
from slidesparse.checkpoints.tensor_names import transformers_loads
from slidesparse.checkpoints.tokenizer_files import lacks_tokenizer
from slidesparse.files.json_files import write_index, write_json
from slidesparse.files.source_files import Links, SourceFiles, survey
from slidesparse.files.staging import new_folder, staged_together
from slidesparse.models.config_keys import MARKER_VERSION, QUANTIZATION_KEY
from slidesparse.models.experts import describe_treated
from slidesparse.models.layerwise import SetLoss
from slidesparse.models.targets import treated_head
from slidesparse.offline.calibrate.calibration import digest, uses_default_text
from slidesparse.offline.calibrate.smoothing import smooth_checkpoint
from slidesparse.offline.estimate import describe_seconds, estimate_seconds
from slidesparse.offline.execute import execute, require_finite, warn_of_filled
from slidesparse.offline.model_card import FILE_NAME as CARD
from slidesparse.offline.model_card import write_card
from slidesparse.offline.outcome import PruneSummary
from slidesparse.offline.plan import Plan, plan
from slidesparse.offline.prune_options import PruneOptions, check_options, require_one_process
from slidesparse.offline.source import Source
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import dtype_name


@dataclass(frozen=True)
class Prepared:
    """A checked pruning, before the work begins.

    Attributes:
        plan: The plan for each tensor.
        destination: The folder to make, which does not exist.
        files: Other files of the source.
        device: Device on which weights are pruned.
    """

    plan: Plan
    destination: Path
    files: SourceFiles
    device: torch.device

    @property
    def n_bytes(self) -> int:
        """Bytes of the new tensors."""
        return sum(stored.n_bytes for shard in self.plan.outputs.values() for stored in shard.values())

    def record(self) -> dict[str, Any]:
        """Return everything that decides the output: see :mod:`slidesparse.files.staging`."""
        made, checkpoint = self.plan, self.plan.source.checkpoint
        options = {**asdict(made.options), "smooth": made.smoothing is not None}
        known = {"version": MARKER_VERSION, "slidesparse": __version__, "options": options}
        known["source"] = fingerprint(checkpoint, checkpoint.config)
        if made.layers is None:
            return known
        # The text windows decide, not the path of the text.
        options["calibration"] = [digest(made.layers.windows), *made.layers.windows.shape]
        options["seed"] = made.layers.matching and made.layers.matching.seed
        # Calibration sums in another order on a GPU than on a CPU; all else has the same bits on all devices.
        return {**known, "device": self.device.type}

    def outcome(self) -> dict[str, Any]:
        """Return the fields of :class:`slidesparse.offline.outcome.PruneOutcome` but for the size."""
        made, source, quantised = self.plan, self.plan.source, self.plan.storage.quantised
        stored = {name: one for shard in made.outputs.values() for name, one in shard.items()}
        quantization = made.config.get(QUANTIZATION_KEY) if quantised else None
        head = None if quantised else treated_head(source.meta.model, made.treated.linears.linears)
        patterns = {name: str(pattern) for name, pattern in made.patterns.items()}
        return {
            "destination": str(self.destination),
            "dtype": dtype_name(made.storage.dtype),
            "rounding": made.storage.rounding,
            "treated_experts": describe_treated(source.experts, patterns),
            "in_transformers": quantization is None or transformers_loads(source.meta.model, quantization, stored),
            "dense_head": None if head is None or made.patterns[head] == DENSE else head,
            "lacks_tokenizer": lacks_tokenizer(self.files, getattr(source.meta.model, "config", None)),
            "method": made.options.method,
            "was_pruned": source.marker is not None,
            "calibrated": _calibration_words(made),
            "default_text": made.layers is not None and uses_default_text(made.options.calibration),
            "not_copied": list(self.files.not_copied),
        }


def prepare(
    source: str | Path, destination: str | Path, options: PruneOptions, device: str | torch.device, links: Links,
    look: Callable[[Source], None] = lambda _: None,
) -> Prepared:  # fmt: skip
    """Check the arguments of :func:`prune_checkpoint` and plan it (``look``), before anything is written."""
    check_options(options)
    where = usable_device(device)
    checkpoint = Checkpoint(usable_path(source, "source"))
    destination = new_folder(usable_path(destination, "destination"), checkpoint.path)
    files = survey(checkpoint.path, {"config.json", INDEX_FILE, *checkpoint.shards}, links)
    return Prepared(plan(checkpoint, options, look), destination, files, where)


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

    Several processes write one folder: each prunes and writes some of the shards, and calibrates on some of the text
    windows. All call this with equal arguments, but for the device; calibration needs devices of one kind.

    Raises:
        CheckpointError: The source cannot be used, or the destination cannot be written.
        InputError: An option or a path cannot be used.
        UnsupportedError: There is no such device here.
    """
    require_one_process(options, ranks.world)
    prepared = prepare(source, destination, options, device, links, partial(require_finite, progress=progress))
    made, checkpoint = prepared.plan, prepared.plan.source.checkpoint
    files, source_card = prepared.files.set_aside(CARD, "source")
    if made.source.marker is not None and ranks.is_first:
        warn_of_filled(made)
    size = prepared.n_bytes + files.n_bytes
    if prepared.device.type == "cpu" and (seconds := estimate_seconds(made, prepared.device)) and seconds > 60:
        LOG.warning("calibrating on a CPU takes %s here, if nothing else runs", describe_seconds(seconds))
    with staged_together(ranks, prepared.destination, checkpoint.path, prepared.record(), size) as work:
        if made.smoothing is not None and made.layers is not None:
            with ranks.first_alone():  # it writes the factors that the others read
                windows, where = made.layers.windows, prepared.device
                checkpoint = smooth_checkpoint(checkpoint, made.smoothing, windows, work.kept, where, progress)
        resumed, layers = execute(made, checkpoint, work, prepared.device, ranks, progress)
        summary = _summary(prepared, resumed, source_card, [] if layers is None else layers.losses)
        if ranks.is_first:
            if list(made.outputs) != [SINGLE_FILE]:
                write_index(work.output / INDEX_FILE, made.outputs, prepared.n_bytes)
            files.copy_to(work.output)
            write_json(work.output / "config.json", made.config)
            write_card(work.output, checkpoint.path, summary)
    return summary


def _summary(
    prepared: Prepared, resumed: list[str], source_card: str | None, losses: Sequence[SetLoss]
) -> PruneSummary:
    made = prepared.plan
    patterns = {name: str(pattern) for name, pattern in made.patterns.items()}
    few = sorted((one for one in losses if one.borrowed), key=lambda one: one.tokens or 0)
    # FP8 has small numbers next to large ones, so outliers of a token do not cost the others.
    rounded = losses if made.storage.dtype == torch.int8 else []
    return PruneSummary(
        **prepared.outcome(),
        patterns={name: one for name, one in patterns.items() if name in made.treated.linears.linears},
        experts={name: one for name, one in patterns.items() if name not in made.treated.linears.linears},
        dense=made.treated.dense,
        other=made.treated.linears.other,
        links=list(prepared.files.links),
        unexpected=list(made.source.meta.names.unexpected),
        resumed=resumed,
        source_card=source_card,
        losses={" ".join(one.names): one.loss for one in losses},
        input_rounding={" ".join(one.names): one.rounding for one in rounded if one.rounding is not None},
        weight_rounding={" ".join(one.names): one.weights for one in losses if one.weights is not None},
        borrowed={one.names[0]: f"{one.tokens} tokens of {(one.tokens or 0) + one.borrowed}" for one in few},
        source_bytes=made.source.checkpoint.n_bytes,
        destination_bytes=prepared.n_bytes,
    )


def _calibration_words(made: Plan) -> str:
    """Describe the method and the text of a calibration, without the text's folder; empty without one."""
    options = made.options
    if made.layers is None or options.calibration is None:
        return ""
    samples, length = made.layers.windows.shape
    steps = f" and {options.match_steps} steps of matching a layer" if options.match_steps else ""
    smoothed = "" if made.smoothing is None else "smoothing and "
    return f"{smoothed}{options.method}{steps}, {samples} windows of {length} tokens of {options.calibration.names}"
