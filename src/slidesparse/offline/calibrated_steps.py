"""What ``prune`` does with the calibration text besides pruning.

It smooths the dense model, and matches pruned layers with dense ones. Each is an option, and what it cannot treat is
refused before anything is written.
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
from slidesparse.offline.calibrate.smoothing import find_smoothing, smooth_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QUANTISED, dtype_name

if TYPE_CHECKING:
    from slidesparse.offline.prune_job import PruneJob


class CalibratedSteps:
    """The steps that the options ask for; each that they do not ask for is None.

    Attributes:
        smooth: Where outliers may be folded into weights.
        matching: How layers are matched.

    Raises:
        InputError: A step does not fit the source, its experts or the type of the output.
    """

    def __init__(self, options: PruneOptions, job: PruneJob) -> None:
        self.patterns = job.calibrated_patterns
        self.smooth: Sequence[Fold] | None = None
        seed = 0 if options.calibration is None else options.calibration.seed
        self.matching = Matching(options.match, seed) if options.match else None
        self.dtype, self.rounding, self.must_smooth = job.dtype, options.rounding, bool(options.smooth)
        if options.smooth:
            if job.source_dtype is not None:
                raise InputError("smoothing", got="a source in 8 bits", needed="a float source")
            if job.dtype not in QUANTISED:
                got = f"--dtype {dtype_name(job.dtype)}"
                raise InputError("smoothing helps rounding to 8 bits", got=got, needed="int8 or fp8")
            self.smooth = find_smoothing(job.meta, job.checkpoint, self.patterns, job.run)
        floats_to_int8 = job.source_dtype is None and job.dtype == torch.int8
        if options.smooth is None and options.calibration is not None and floats_to_int8:
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
        """Return the checkpoint to prune, smoothed where that is asked for or helps."""
        if self.smooth is None:
            return checkpoint
        how = self.patterns, windows, folder, device, progress, self.dtype, self.rounding
        return smooth_checkpoint(checkpoint, self.smooth, *how, required=self.must_smooth)


def _folds(job: PruneJob) -> Sequence[Fold]:
    """Return where outliers may be folded into weights; nothing where a model has no such place."""
    try:
        return find_smoothing(job.meta, job.checkpoint, job.calibrated_patterns, job.run)
    except InputError:
        return ()
