"""What ``prune`` does with the calibration text besides pruning.

It rotates or smooths the dense model, and matches pruned layers with dense ones. Each is an option, and what
it cannot treat is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slidesparse.errors import InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.models.match_layer import Matching
from slidesparse.models.smooth import Fold
from slidesparse.offline.calibrate.rotating import Rotation, find_rotation, rotate_checkpoint
from slidesparse.offline.calibrate.smoothing import find_smoothing, smooth_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QUANTISED, dtype_name

if TYPE_CHECKING:
    from slidesparse.offline.prune_job import PruneJob


class CalibratedSteps:
    """The steps that the options ask for; each that they do not ask for is None.

    Args:
        options: The options.
        job: The model and its linears, of which no weight is read here.

    Attributes:
        rotation: How the stream is rotated.
        rotate: Steps of learning a rotation.
        smooth: Where outliers may be folded into weights.
        matching: How layers are matched.

    Raises:
        InputError: A step does not fit the source, its experts or the type of the output.
    """

    def __init__(self, options: PruneOptions, job: PruneJob) -> None:
        self.rotate, self.patterns = options.rotate, job.calibrated_patterns
        self.seed = 0 if options.calibration is None else options.calibration.seed
        self.rotation: Rotation | None = None
        self.smooth: Sequence[Fold] | None = None
        self.matching = Matching(options.match, self.seed) if options.match else None
        self.dtype, self.rounding, self.must_smooth = job.dtype, options.rounding, bool(options.smooth)
        where = job.meta, job.checkpoint, self.patterns, job.run
        if options.rotate:
            _require_floats(job, "rotating")
            if job.experts.found:
                what, got = "the stream of a mixture cannot be rotated", "routers that read it"
                raise InputError(what, got=got, remedy="leave out --rotate")
            self.rotation = find_rotation(*where)
        if options.smooth:
            _require_floats(job, "smoothing")
            if job.dtype not in QUANTISED:
                got = f"--dtype {dtype_name(job.dtype)}"
                raise InputError("smoothing helps rounding to 8 bits", got=got, needed="int8 or fp8")
            self.smooth = find_smoothing(*where)
        floats_to_int8 = job.source_dtype is None and job.dtype == torch.int8
        if options.smooth is None and options.calibration is not None and not options.rotate and floats_to_int8:
            self.smooth = _folds(job) or None
        if options.match and any(pattern != DENSE for pattern in job.experts.patterns.values()):
            raise InputError(
                "layers whose experts are pruned cannot be matched",
                got=f"experts such as {job.experts.layers[0]}",
                remedy=f"leave out --match, or leave experts dense with {LEAVE_DENSE}",
            )

    def prepare(
        self, checkpoint: Checkpoint, windows: torch.Tensor, folder: Path, device: torch.device, progress: bool | None
    ) -> Checkpoint:
        """Return the checkpoint to prune: rotated or smoothed.

        Args:
            checkpoint: The source.
            windows: Calibration text, int64 [samples, length].
            folder: Keeps what was found, so that an interrupted run goes on with the same.
            device: Where layers run.
            progress: Show progress bars; None: on a terminal only.
        """
        how = self.patterns, windows, folder, device
        if self.rotation is not None:
            checkpoint = rotate_checkpoint(
                checkpoint, self.rotation, *how, self.rotate, seed=self.seed, progress=progress
            )
        if self.smooth is not None:
            rounded = self.dtype, self.rounding
            checkpoint = smooth_checkpoint(checkpoint, self.smooth, *how, progress, *rounded, required=self.must_smooth)
        return checkpoint


def foldable(job: PruneJob) -> set[str] | None:
    """Return the linears that smoothing would help; None where the source has 8 bits, which stay as they are."""
    if job.source_dtype is not None or job.steps.smooth is not None:
        return None if job.source_dtype is not None else set()
    return {linear for fold in _folds(job) for linear in fold.linears}


def _folds(job: PruneJob) -> Sequence[Fold]:
    """Return where outliers may be folded into weights; nothing where a model has no such place."""
    try:
        return find_smoothing(job.meta, job.checkpoint, job.calibrated_patterns, job.run)
    except InputError:
        return ()


def _require_floats(job: PruneJob, doing: str) -> None:
    """Refuse a step that weights in 8 bits do not allow."""
    if job.source_dtype is not None:
        raise InputError(doing, got="a source in 8 bits", needed="a float source")
