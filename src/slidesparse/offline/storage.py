"""The form in which ``slidesparse prune`` stores the weights that it treats: their type, and how they are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.offline.prune_options import PruneOptions, Recipe, resolve_dtypes
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import (
    QUANTISED,
    Rounding,
    loadable,
    quantize_weight,
    requantize,
    rounding_of,
    ternary_scale,
    ternary_weight,
)


@dataclass(frozen=True)
class Storage:
    """The form of treated weights.

    Attributes:
        source: Type of a source in 8 bits, whose scales are kept; None: it is in a float type.
        dtype: Type of the new weights.
        recipe: How INT8 weights are rounded.
    """

    source: torch.dtype | None
    dtype: torch.dtype
    recipe: Recipe

    @classmethod
    def of(cls, checkpoint: Checkpoint, options: PruneOptions) -> Storage:
        """Return what the options ask for; see :func:`slidesparse.offline.prune_options.resolve_dtypes`."""
        return cls(*resolve_dtypes(checkpoint, options), options.recipe)

    @property
    def quantised(self) -> bool:
        """Whether the new weights have 8 bits."""
        return self.dtype in QUANTISED

    @property
    def rounds(self) -> bool:
        """Whether weights of a float type become 8 bits."""
        return self.source is None and self.quantised

    @property
    def rounding(self) -> Rounding:
        """How weights are rounded that the recipe does not make ternary."""
        return "6bit" if self.recipe == "6bit" else "absmax"

    def announced(self, names: Sequence[str], rows: int, columns: int) -> dict[str, Stored]:
        """Return the types and shapes of what :meth:`tensors` returns, for a weight [rows, columns]."""
        rows //= len(names)
        found: dict[str, Stored] = {}
        for name in names:
            found[name] = Stored(STORED_NAMES[self.dtype], (rows, columns))
            if self.rounds:
                found[f"{name}_scale"] = Stored("F32", (rows, 1))
        return found

    def tensors(
        self,
        names: Sequence[str],
        weight: torch.Tensor,
        pattern: Pattern,
        *,
        scale: torch.Tensor | None = None,
        dense: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return a weight as it is stored, with its scales unless the source has them.

        Args:
            names: Tensors among which its rows are cut: one, but for gate and up of an expert.
            weight: Pruned, float [out, in].
            pattern: Its pattern.
            scale: Of a quantised source: [out, 1] or [out].
            dense: The weight before, for the ternary recipe.
        """
        if scale is not None:
            return {names[0]: requantize(weight, scale, self.dtype)}
        if not self.quantised:
            return {names[0]: weight}
        found: dict[str, torch.Tensor] = {}
        for name, rows in zip(names, weight.chunk(len(names)), strict=True):
            if self.recipe == "ternary" and dense is not None:
                absmean = ternary_scale(dense.cpu()).to(weight.device)  # on the CPU: a sum depends on its order
                rounded = ternary_weight(rows, absmean, self.dtype, name=name)
            else:
                recipe = rounding_of(self.rounding, pattern)
                rounded = loadable(quantize_weight(rows, self.dtype, name=name, recipe=recipe))
            found[name], found[f"{name}_scale"] = rounded
        return found
