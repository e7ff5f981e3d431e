"""What ``prune`` does with the calibration text besides pruning.

It rotates, smooths and reorders the dense model, and matches pruned layers with dense ones. Each is an option, and what
it cannot treat is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slidesparse.errors import InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.meta_model import MetaModel
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.models.match_layer import Matching
from slidesparse.models.reorder import Inner
from slidesparse.models.smooth import Fold
from slidesparse.offline.calibrate.reordering import find_reordering, reorder_checkpoint
from slidesparse.offline.calibrate.rotating import Rotation, find_rotation, rotate_checkpoint
from slidesparse.offline.calibrate.smoothing import find_smoothing, smooth_checkpoint
from slidesparse.offline.prune_experts import ExpertJob
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import QUANTISED, Rounding, dtype_name


@dataclass(frozen=True)
class CalibratedSteps:
    """The steps that the options ask for.

    Attributes:
        rotation: How the stream is rotated; None: it is not.
        rotate: Steps of learning a rotation.
        smooth: Where outliers may be folded into weights; None: they are not.
        must_smooth: Whether it is refused where nothing can be.
        reorder: Channels inside MLPs that may be reordered; None: they are not.
        matching: How layers are matched; None: they are not.
        seed: Of the calibration text, and of all that is drawn.
        dtype: Of the output.
        rounding: How INT8 weights are rounded.
    """

    rotation: Rotation | None
    rotate: int
    smooth: Sequence[Fold] | None
    must_smooth: bool
    reorder: Sequence[Inner] | None
    matching: Matching | None
    seed: int
    dtype: torch.dtype
    rounding: Rounding

    def prepare(
        self,
        checkpoint: Checkpoint,
        patterns: Mapping[str, Pattern],
        windows: torch.Tensor,
        folder: Path,
        device: torch.device,
        progress: bool | None,
    ) -> Checkpoint:
        """Return the checkpoint to prune: rotated first, then smoothed, then reordered.

        Args:
            checkpoint: The source.
            patterns: Linear -> pattern, of all that will be treated.
            windows: Calibration text, int64 [samples, length].
            folder: Keeps what was found, so that an interrupted run goes on with the same.
            device: Where layers run.
            progress: Show progress bars; None: on a terminal only.
        """
        if self.rotation is not None:
            checkpoint = rotate_checkpoint(
                checkpoint,
                self.rotation,
                patterns,
                windows,
                folder,
                device,
                self.rotate,
                seed=self.seed,
                progress=progress,
            )
        if self.smooth is not None:
            checkpoint = smooth_checkpoint(
                checkpoint,
                self.smooth,
                patterns,
                windows,
                folder,
                device,
                progress,
                self.dtype,
                self.rounding,
                required=self.must_smooth,
            )
        if self.reorder is not None:
            checkpoint = reorder_checkpoint(checkpoint, self.reorder, patterns, windows, folder, device, progress)
        return checkpoint


@dataclass(frozen=True)
class Source:
    """What is known of a model before any of its weights is read.

    Attributes:
        checkpoint: The source.
        meta: Its meta model.
        experts: Its experts.
        quantised: Its type of 8 bits; None: float.
        patterns: Linear -> pattern, of all that will be treated.
        run: Runs the meta model once; None: it cannot be run.
    """

    checkpoint: Checkpoint
    meta: MetaModel
    experts: ExpertJob
    quantised: torch.dtype | None
    patterns: Mapping[str, Pattern]
    run: Callable[[], object] | None

    def require_floats(self, doing: str) -> None:
        """Refuse a step that weights in 8 bits do not allow."""
        if self.quantised is not None:
            raise InputError(doing, got="a source in 8 bits", needed="a float source")

    def foldable(self) -> set[str]:
        """Return the linears into which outliers of their inputs can be folded."""
        return {linear for fold in self.folds() for linear in fold.linears}

    def folds(self) -> Sequence[Fold]:
        """Return what may be smoothed; nothing where nothing can be."""
        try:
            return find_smoothing(self.meta, self.checkpoint, self.patterns, self.run)
        except InputError:
            return ()


def steps_of(options: PruneOptions, source: Source, dtype: torch.dtype) -> CalibratedSteps:
    """Return the steps that the options ask for, which go together; ``dtype`` is that of the output.

    Raises:
        InputError: A step does not fit the source, its experts or the type of the output.
    """
    return CalibratedSteps(
        rotation=_rotation(options, source),
        rotate=options.rotate,
        smooth=_smooth(options, source, dtype),
        must_smooth=bool(options.smooth),
        reorder=_reorder(options, source),
        matching=_matching(options, source.experts),
        seed=0 if options.calibration is None else options.calibration.seed,
        dtype=dtype,
        rounding=options.rounding,
    )


def _matching(options: PruneOptions, experts: ExpertJob) -> Matching | None:
    if options.match == 0 or options.calibration is None:
        return None
    if any(pattern != DENSE for pattern in experts.patterns.values()):
        raise InputError(
            "layers whose experts are pruned cannot be matched",
            got=f"experts such as {experts.layers[0]}",
            remedy=f"leave out --match, or leave experts dense with {LEAVE_DENSE}",
        )
    return Matching(options.match, options.calibration.seed)


def _smooth(options: PruneOptions, source: Source, dtype: torch.dtype) -> Sequence[Fold] | None:
    if options.smooth is None:
        usual = options.calibration is not None and not options.rotate and not source.quantised and dtype == torch.int8
        return source.folds() or None if usual else None
    if not options.smooth:
        return None
    if source.quantised is not None or dtype not in QUANTISED:
        got = "a source in 8 bits" if source.quantised else f"--dtype {dtype_name(dtype)}"
        raise InputError("smoothing helps rounding to 8 bits", got=got, needed="a float source and int8 or fp8")
    return find_smoothing(source.meta, source.checkpoint, source.patterns, source.run)


def _reorder(options: PruneOptions, source: Source) -> Sequence[Inner] | None:
    if not options.reorder:
        return None
    source.require_floats("reordering")
    return find_reordering(source.meta, source.checkpoint, source.patterns, source.run)


def _rotation(options: PruneOptions, source: Source) -> Rotation | None:
    if options.rotate == 0:
        return None
    source.require_floats("rotating")
    if source.experts.found:
        raise InputError(
            "the stream of a mixture cannot be rotated", got="routers that read it", remedy="leave out --rotate"
        )
    return find_rotation(source.meta, source.checkpoint, source.patterns, source.run)
