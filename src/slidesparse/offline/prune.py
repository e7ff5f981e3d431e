"""``slidesparse prune``: from a dense checkpoint to a sparse, quantised one, tensor by tensor.

The source may be BF16, FP16 or FP32, a BitNet b1.58 master (BF16, made ternary), or compressed-tensors W8A8 already.
The output is described in :mod:`slidesparse.files.marker`. Output shards mirror the source's, so that each can be
written, and taken over by a resumed run, on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slidesparse import __version__
from slidesparse.base.counted import counted
from slidesparse.base.dealing import deal
from slidesparse.base.device import usable_device
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import progress_bar
from slidesparse.base.ranks import ALONE, Ranks
from slidesparse.base.readable_size import readable_size
from slidesparse.files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from slidesparse.files.identity import fingerprint
from slidesparse.files.json_files import write_json
from slidesparse.files.shared_staging import staged_together
from slidesparse.files.source_files import Links, SourceFiles, survey
from slidesparse.files.staging import Workplace, new_folder
from slidesparse.files.stored import Stored
from slidesparse.files.tokenizer_files import NO_TOKENIZER, lacks_tokenizer, require_fetched
from slidesparse.files.untied import untied
from slidesparse.models.config_keys import MARKER_VERSION
from slidesparse.models.experts import EXPERTS_FOLLOW
from slidesparse.models.layerwise import SetLoss
from slidesparse.models.targets import describe_dense
from slidesparse.offline.calibrate.calibration import digest
from slidesparse.offline.calibrate.rounded_inputs import describe_rounding, rounding_costs, shown_names
from slidesparse.offline.cards import warn_of_type
from slidesparse.offline.check_options import check_options, require_one_process
from slidesparse.offline.model_card import FILE_NAME as CARD
from slidesparse.offline.model_card import write_card
from slidesparse.offline.plan.plan_file import StoredPlan
from slidesparse.offline.prune_job import PruneJob
from slidesparse.offline.prune_options import PruneOptions, Recipe
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QUANTISED, dtype_name, parse_dtype

NOT_IN_TRANSFORMERS = (
    "transformers cannot load experts in this form: vLLM and slidesparse.load do, and --dtype bf16 fits all"
)

SIX_BITS = "pruned weights have six bits: files hold them as INT8, a Hopper GPU takes 0.8 of the memory for them"

MOST_NAMES = 3
"""Most names of tensors in a line."""


@dataclass(frozen=True)
class PruneSummary:
    """The outcome of pruning a checkpoint.

    Attributes:
        destination: The new checkpoint.
        dtype: Type of the treated weights.
        recipe: How INT8 weights were rounded.
        patterns: Treated layer -> pattern.
        experts: Treated weights of experts -> pattern, of a mixture.
        treated_experts: Lines that describe them.
        in_transformers: Whether transformers reads them.
        dense_head: The output embedding, where it follows a pattern and vLLM runs it dense; else None.
        dense: Linear left alone -> why.
        other: Module or parameter that multiplies and is no ``nn.Linear`` -> why it was left alone.
        lacks_tokenizer: Whether the model takes text, and the source has no tokenizer to copy.
        not_copied: Files of the source that hold other copies of the weights.
        links: Links of the source that were left out.
        unexpected: Unexpected keys: tensors that were copied although the model does not use them.
        resumed: Shards that an interrupted run had finished.
        source_card: Name that the source's README.md has in the new checkpoint, whose README.md is a new model card;
            None where the source has none.
        losses: Linears that read one input -> squared error of their outputs over their energy on the calibration text,
            before their layer is matched; empty without calibration.
        rounding: The same linears -> what rounding inputs to INT8 costs, in the same measure; empty without calibration
            and for other types.
        rounded_inputs: Lines that say so, and what may be done where it is much.
        borrowed: Weights of experts to which the router sent too few tokens -> how many of how many.
        source_bytes: Tensors of the source.
        destination_bytes: Tensors of the new checkpoint.
    """

    destination: str
    dtype: str
    recipe: Recipe
    patterns: dict[str, str]
    experts: dict[str, str]
    treated_experts: list[str]
    in_transformers: bool
    dense_head: str | None
    dense: dict[str, str]
    other: dict[str, str]
    lacks_tokenizer: bool
    not_copied: list[str]
    links: list[str]
    unexpected: list[str]
    resumed: list[str]
    source_card: str | None
    losses: dict[str, float]
    rounding: dict[str, float]
    rounded_inputs: list[str]
    borrowed: dict[str, str]
    source_bytes: int
    destination_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def describe(self) -> str:
        """Return the summary as text."""
        counts = Counter(self.patterns.values())
        found = ", ".join(f"{n} at {pattern}" for pattern, n in counts.most_common())
        lines = [f"treated {counted(len(self.patterns), 'layer')}: {found}"]
        lines += [f"treated experts: {line}" for line in self.treated_experts]
        lines += what_rounding_gives(self.recipe, [*self.patterns.values(), *self.experts.values()])
        lines += what_readers_do(bool(self.experts), self.in_transformers, self.dense_head)
        if self.losses:
            worst = max(self.losses, key=self.losses.__getitem__)
            mean = sum(self.losses.values()) / len(self.losses)
            lines.append(f"calibration loss: mean {mean:.2e}, worst {self.losses[worst]:.2e} at {shown_names(worst)}")
        lines += self.rounded_inputs
        if self.borrowed:
            name, words = next(iter(self.borrowed.items()))
            count = f"{len(self.borrowed)} of the experts' weights"
            lines.append(f"saw few tokens, and borrowed from their layer: {count}, such as {name} ({words})")
        lines += describe_dense({**self.dense, **self.other})
        lines += [f"copied, though the model does not use them: {_some(self.unexpected)}"] if self.unexpected else []
        lines += [f"taken over from an interrupted run: {', '.join(self.resumed)}"] if self.resumed else []
        lines += [f"not copied, they hold other weights: {', '.join(self.not_copied)}"] if self.not_copied else []
        lines += [f"not copied, they are links: {', '.join(self.links)}"] if self.links else []
        lines += [NO_TOKENIZER] if self.lacks_tokenizer else []
        own = "" if self.source_card is None else f"; the source's own is {self.source_card}"
        lines.append(f"{CARD} is a model card to read and correct{own}")
        sizes = f"{readable_size(self.source_bytes)} -> {readable_size(self.destination_bytes)}"
        lines.append(f"{sizes} in {self.destination}")
        warning = warn_of_type(parse_dtype(self.dtype))
        return "\n".join(lines if warning is None else [*lines, warning])


def what_rounding_gives(recipe: Recipe, patterns: Iterable[str]) -> list[str]:
    """Return a line on values of six bits, where weights of these patterns have them: sizes of files do not show it."""
    return [SIX_BITS] if recipe == "6bit" and any(pattern != str(DENSE) for pattern in patterns) else []


def what_readers_do(has_experts: bool, in_transformers: bool, dense_head: str | None) -> list[str]:
    """Return lines on what other programs do with the result; see :class:`PruneSummary` for the arguments."""
    head = f"{dense_head} follows its pattern, and vLLM runs it dense: it asks no plugin for one in a float type"
    said = {
        EXPERTS_FOLLOW: has_experts,
        NOT_IN_TRANSFORMERS: not in_transformers,
        head: dense_head is not None,
    }
    return [line for line, holds in said.items() if holds]


def _some(names: list[str]) -> str:
    """Return names of tensors for a line; a head with experts has hundreds of them."""
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} tensors, such as {names[0]}"


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the work begins.

    Attributes:
        checkpoint: The source.
        destination: The folder to make, which does not exist.
        files: Other files of the source.
        job: How every tensor is treated.
        outputs: File name -> tensor -> type and shape, of the new checkpoint.
        weights: Fingerprint of the source, where it was needed already; else None.
    """

    checkpoint: Checkpoint
    destination: Path
    files: SourceFiles
    job: PruneJob
    outputs: dict[str, dict[str, Stored]]
    weights: str | None

    @property
    def n_bytes(self) -> int:
        """Bytes of the new tensors."""
        return sum(stored.n_bytes for shard in self.outputs.values() for stored in shard.values())

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether the model takes text, and there is no tokenizer to copy."""
        return lacks_tokenizer(self.files, getattr(self.job.meta.model, "config", None))


def prepare(
    source: str | Path,
    destination: str | Path,
    options: PruneOptions,
    device: str | torch.device,
    links: Links,
    followed: StoredPlan | None = None,
) -> Prepared:
    """Check everything that can be checked before anything is written: see :func:`prune_checkpoint`."""
    check_options(options)
    where = usable_device(device)
    checkpoint = Checkpoint(usable_path(source, "source"))
    destination = new_folder(usable_path(destination, "destination"), checkpoint.path)
    files = survey(checkpoint.path, {"config.json", INDEX_FILE, *checkpoint.shards}, links)
    require_fetched(files)
    weights = None
    if followed is not None:
        weights = fingerprint(checkpoint, checkpoint.config)
        followed.warn_of_other_weights(weights, checkpoint.path)  # it may explain an error that comes later
    checkpoint = untied(checkpoint) if options.rotate else checkpoint
    job = PruneJob(checkpoint, options, where, followed)
    outputs = {name: job.outputs(shard) for name, shard in checkpoint.shards.items()}
    return Prepared(checkpoint, destination, files, job, outputs, weights)


def plan_of(prepared: Prepared, options: PruneOptions) -> dict[str, Any]:
    """Return everything that decides the output: see :mod:`slidesparse.files.staging`."""
    checkpoint, windows = prepared.checkpoint, prepared.job.windows
    plan = {
        "version": MARKER_VERSION,
        "slidesparse": __version__,
        "options": asdict(options),
        "source": prepared.weights or fingerprint(checkpoint, checkpoint.config),
    }
    if windows is None:
        return plan
    # Calibration sums in another order on a GPU than on a CPU; without it, all devices give the same bits.
    return {**plan, "windows": digest(windows), "device": prepared.job.device.type}


def prune_checkpoint(
    source: str | Path,
    destination: str | Path,
    options: PruneOptions,
    *,
    device: str | torch.device = "cpu",
    links: Links = "refuse",
    followed: StoredPlan | None = None,
    progress: bool | None = None,
    ranks: Ranks = ALONE,
) -> PruneSummary:
    """Prune and quantise a checkpoint into a new folder. The source is never touched.

    Several processes write one folder: each prunes and writes some of the shards, and calibrates on some of the
    windows. All of them call this with equal arguments, but for the device; to calibrate it is of one kind.

    Args:
        source: A local Hugging Face checkpoint.
        destination: A folder that does not exist.
        options: Patterns, type, method and exceptions.
        device: Where weights are pruned and quantised, and where calibration runs the model's layers, one at a time.
        links: What to do with links that lead out of the source.
        followed: The plan that the options are of, to warn where it is not one for this source.
        progress: Show a progress bar; None: on a terminal only.
        ranks: The processes that do it together, from :func:`slidesparse.base.ranks.joined`.

    Raises:
        CheckpointError: The source cannot be used, or the destination cannot be written.
        InputError: An option or a path cannot be used.
        UnsupportedError: There is no such device here.
    """
    require_one_process(options, ranks.world)
    if options.smooth is None and ranks.world > 1:
        options = replace(options, smooth=False)
    prepared = prepare(source, destination, options, device, links, followed)
    checkpoint, destination, job = prepared.checkpoint, prepared.destination, prepared.job
    size = prepared.n_bytes
    files, kept_card = prepared.files.set_aside(CARD, "source")
    plan = plan_of(prepared, options)
    with staged_together(ranks, destination, checkpoint.path, plan, size + files.n_bytes) as work:
        job.calibrate(work.kept, progress, ranks)
        resumed = _write_shards(prepared, work, ranks, progress)
        if ranks.is_first:
            _write_the_rest(prepared, work, options, files, kept_card)
    losses = job.calibrated.losses if job.calibrated else []
    # FP8 has small numbers next to large ones, so outliers of a token cost its others nothing.
    rounded = losses if job.dtype == torch.int8 else []
    return PruneSummary(
        destination=str(destination),
        dtype=dtype_name(job.dtype),
        recipe=options.recipe,
        patterns={name: str(pattern) for name, pattern in job.patterns.items()},
        experts={name: str(pattern) for name, pattern in job.experts.patterns.items()},
        treated_experts=job.experts.describe(),
        in_transformers=job.experts.in_transformers,
        dense_head=job.dense_head,
        dense={**job.targets.dense, **job.routers, **job.experts.dense},
        other=job.targets.other,
        lacks_tokenizer=prepared.lacks_tokenizer,
        not_copied=list(files.not_copied),
        links=list(files.links),
        unexpected=list(job.meta.names.unexpected),
        resumed=resumed,
        source_card=kept_card,
        losses={" ".join(loss.names): loss.loss for loss in losses},
        rounding=rounding_costs(rounded),
        rounded_inputs=describe_rounding(rounded, job.foldable),
        borrowed=_borrowed(losses),
        source_bytes=checkpoint.n_bytes,
        destination_bytes=size,
    )


def _borrowed(losses: Iterable[SetLoss]) -> dict[str, str]:
    """Return the experts' weights whose inputs are filled up from their layer, fewest tokens first."""
    few = sorted((one for one in losses if one.borrowed), key=lambda one: one.tokens or 0)
    return {one.names[0]: f"{one.tokens} tokens of {(one.tokens or 0) + one.borrowed}" for one in few}


def _write_shards(prepared: Prepared, work: Workplace, ranks: Ranks, progress: bool | None) -> list[str]:
    """Write this process's shards, and return those of all processes that an interrupted run had finished."""
    sizes = {name: sum(one.n_bytes for one in tensors.values()) for name, tensors in prepared.outputs.items()}
    own = deal(sizes, ranks.world)[ranks.rank]
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


def _write_the_rest(
    prepared: Prepared, work: Workplace, options: PruneOptions, files: SourceFiles, kept_card: str | None
) -> None:
    """Write everything but the tensors: the index, the config, the model card and the source's other files."""
    checkpoint, job = prepared.checkpoint, prepared.job
    if list(prepared.outputs) != [SINGLE_FILE]:
        weight_map = {tensor: shard for shard, tensors in prepared.outputs.items() for tensor in tensors}
        write_json(work.output / INDEX_FILE, {"metadata": {"total_size": prepared.n_bytes}, "weight_map": weight_map})
    files.copy_to(work.output)
    write_json(work.output / "config.json", job.config())
    write_card(
        work.output,
        checkpoint.path,
        patterns={name: str(pattern) for name, pattern in job.patterns.items()},
        dtype=dtype_name(job.dtype),
        quantised=job.dtype in QUANTISED,
        recipe=options.recipe,
        method=_method_words(options, job.windows),
        reordered=job.steps.reorder is not None,
        rotated=job.steps.rotation is not None,
        experts=job.experts.describe(),
        in_transformers=job.experts.in_transformers,
        left=describe_dense(job.left),
        sizes=(checkpoint.n_bytes, prepared.n_bytes),
        source_card=None if kept_card is None else work.output / kept_card,
    )


def _method_words(options: PruneOptions, windows: torch.Tensor | None) -> str:
    """Return the method and the text that it saw, without the folder of the text."""
    if options.calibration is None or windows is None:
        return options.method
    samples, length = windows.shape
    steps = f" and {options.match} steps of matching a layer" if options.match else ""
    before = {
        f"{options.rotate} steps of learning a rotation": options.rotate,
        "smoothing": options.smooth,
        "reordering": options.reorder,
    }
    method = " and ".join([*(word for word, given in before.items() if given), options.method])
    return f"{method}{steps}, {samples} windows of {length} tokens of {options.calibration.names}"
