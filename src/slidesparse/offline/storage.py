"""The stored form of treated tensors: names, types, shapes and rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slidesparse.checkpoints.expert_tensors import ExpertTensor
from slidesparse.checkpoints.single_experts import SingleExperts
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.offline.prune_options import PruneRounding
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import QUANTISED, Rounding, loadable, quantize_weight, rounding_of, ternary_weight


@dataclass(frozen=True)
class TensorJob:
    """The job for one tensor of the source.

    Attributes:
        outputs: New tensor -> type and shape.
        layer: The treated linear, or kind of experts' weights; None: the tensor is copied.
        pattern: Pattern of the layer; at ``dense`` it is rounded and not pruned.
        becomes: For each weight [out, in] in a treated tensor its ``outputs``, without scales.
        expert: Contents of a treated tensor of experts; None for others.
    """

    outputs: Mapping[str, Stored]
    layer: str | None = None
    pattern: Pattern = DENSE
    becomes: Sequence[Sequence[str]] = ()
    expert: ExpertTensor | None = None


@dataclass(frozen=True)
class Storage:
    """The stored form of treated weights.

    Attributes:
        source: Type of a source in 8 bits, whose scales are kept; None: it is in a float type.
        dtype: Type of the new weights.
        rounding: Rounding of INT8 weights.
        common: The common pattern.
    """

    source: torch.dtype | None
    dtype: torch.dtype
    rounding: PruneRounding
    common: Pattern

    @property
    def quantised(self) -> bool:
        """Whether the new weights have 8 bits."""
        return self.dtype in QUANTISED

    @property
    def rounds(self) -> bool:
        """Whether weights of a float type become 8 bits."""
        return self.source is None and self.quantised

    @property
    def weight_rounding(self) -> Rounding:
        """Rounding of weights of the common pattern; ternary ones have three values already."""
        return "6bit" if self.rounding == "6bit" else "absmax"

    def rounding_of(self, pattern: Pattern) -> Rounding:
        """Return the rounding of weights of a pattern."""
        return rounding_of(self.weight_rounding, pattern, self.common)

    def job(
        self,
        tensor: str,
        stored: Stored,
        layer: str,
        pattern: Pattern,
        expert: ExpertTensor | None = None,
        single: SingleExperts | None = None,
    ) -> TensorJob:
        """Return the job for a treated tensor; ``single`` names its experts where each gets tensors of its own.

        Without quantising, tensors keep names and shapes. Quantised experts are one tensor each, with a scale for each
        channel, as vLLM reads them.
        """
        count = 1 if len(stored.shape) == 2 else stored.shape[0]
        if not self.quantised:
            return TensorJob({tensor: stored}, layer, pattern, ((tensor,),) * count, expert)
        becomes = (
            [single.names(tensor, index) for index in range(count)] if single and len(stored.shape) == 3 else [[tensor]]
        )
        rows, columns = stored.shape[:-3:-1] if expert is not None and expert.transposed else stored.shape[-2:]
        outputs: dict[str, Stored] = {}
        for names in becomes:
            for name in names:
                outputs[name] = Stored(STORED_NAMES[self.dtype], (rows // len(names), columns))
                if self.rounds:
                    outputs[f"{name}_scale"] = Stored("F32", (rows // len(names), 1))
        return TensorJob(outputs, layer, pattern, becomes, expert)

    def tensors(
        self, names: Sequence[str], weight: torch.Tensor, pattern: Pattern, absmean: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a pruned weight [out, in]: its rows split among names, with scales.

        The ternary rounding scales by the ``absmean`` of the unpruned weight.
        """
        if not self.quantised:
            return {names[0]: weight}
        stored: dict[str, torch.Tensor] = {}
        for name, rows in zip(names, weight.chunk(len(names)), strict=True):
            if absmean is not None:
                stored[name], stored[f"{name}_scale"] = ternary_weight(rows, absmean, self.dtype, name=name)
            else:
                rounded = quantize_weight(rows, self.dtype, name=name, rounding=self.rounding_of(pattern))
                stored[name], stored[f"{name}_scale"] = loadable(rounded)
        return stored
