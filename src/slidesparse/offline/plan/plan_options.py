"""The options of ``slidesparse plan``."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from slidesparse.base.from_bench import from_bench
from slidesparse.errors import InputError
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.plan.choose_patterns import Target
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import QuantName, Rounding, check_rounding, parse_dtype, rounded_bits

CANDIDATES = ("14:16", "10:12", "8:10", "6:8", "4:6", "2:4")
"""What linears may get by default. Partial ones came into no best plan of the first nine layers of SmolLM2-135M."""

SERVED_LOADS = "served-loads"
"""The part of slidesparse-bench that knows what loads take as they were served."""

HELD_OUT = 4
"""Windows of text on which predictions are compared; the pruning method does not see them."""

LEAST_GAIN = 0.1
"""Least gain of a 2:4 multiply that a plan is made for: no GPU is that slow at it."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan.

    Attributes:
        target: The speed-up, share of zeros or size to reach.
        calibration: Text that the method sees, and ``HELD_OUT`` windows more on which damage is measured. A method that
            needs no calibration sees none of its ``samples``.
        method: Pruning method that will be used.
        patterns: Patterns that linears may get, besides staying dense.
        mma_gain: How much faster a 2:4 multiply is than a dense one of the same size: 2, or about 1.6 on Hopper. It
            counts where no loads are given.
        at: Loads at which the speed-up over stock vLLM is reached, by measured times: ``prefill:4096``, ``mixed``. They
            need slidesparse-bench.
        dtype: Type of the weights that will be served: ``int8`` or ``fp8``.
        ignore: Linears to leave alone.
        gpu: Whose times count with ``at``, ``H100`` or ``H200``; None: the device's, an H200's for the CPU.
        recipe: How weights will be rounded: ``6bit`` rounds INT8 to six bits, which take less memory.

    Raises:
        InputError: An option is no value, or contradicts another, whatever the source is.
        UnsupportedError: There are loads, and slidesparse-bench is not installed.
    """

    target: Target
    calibration: Calibration
    method: str = "sparsegpt"
    patterns: tuple[str, ...] = CANDIDATES
    mma_gain: Fraction = Fraction(2)
    at: tuple[str, ...] = ()
    dtype: QuantName = "int8"
    ignore: tuple[str, ...] = ()
    gpu: str | None = None
    recipe: Rounding = "absmax"

    def __post_init__(self) -> None:
        check_rounding(self.recipe, parse_dtype(self.dtype))
        if self.at and self.target.speedup is None:
            raise InputError("loads of a plan", got="--at without --speedup", needed="a speed-up to reach there")
        if self.gpu is not None and not self.at:
            raise InputError("--gpu", got="no --at", needed="loads that it is to serve")
        if self.at:
            from_bench(SERVED_LOADS, "slidesparse plan --at").check_loads(self.at, self.gpu, self.dtype)
        for pattern in self.patterns:
            Pattern.parse(pattern)
        get_pruner(self.method)

    @property
    def bits(self) -> int:
        """Bits of a kept value in memory."""
        return rounded_bits(self.recipe, parse_dtype(self.dtype))


def parse_gain(text: str) -> Fraction:
    """Return the gain of a 2:4 multiply over a dense one, from 0.1 to 2, to six digits; an InputError for all else."""
    try:
        gain = float(text)  # a Fraction of 1e-999999999 would be computed for days
    except ValueError as error:
        raise InputError("--mma-gain", got=repr(text), needed="a number such as 2 or 1.6") from error
    if not LEAST_GAIN <= gain <= 2:
        raise InputError("--mma-gain", got=text, needed=f"{LEAST_GAIN:g} to 2")
    return Fraction(gain).limit_denominator(10**6)


def refuse_samples(samples: int | None, method: str) -> None:
    """Refuse a number of windows for a method that sees none; damage is measured on a text all the same."""
    if samples is not None and not get_pruner(method).needs_calibration:
        raise InputError(
            "options without effect",
            got=f"--samples with --method {method}",
            needed="a method that sees calibration windows",
            remedy="use --method sparsegpt or wanda, or leave out --samples",
        )
