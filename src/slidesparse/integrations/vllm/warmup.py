"""A layer runs batches of many sizes when it is loaded, so that little is compiled or planned while vLLM serves.

vLLM itself runs the largest batch, and those that it captures. Between them lie batches for which a backend has other
tiles or plans, and the first of them would make a user wait. All tiles of the Hopper kernel are loaded, whatever
batches would choose them. Which norm or activation a layer is joined with is known when its graph is compiled, so what
lifts behind it runs then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.launch import load_all
from slidesparse.gemm.hopper.tiles import TILES
from slidesparse.gemm.select import get_backend
from slidesparse.gemm.spec import Switch
from slidesparse.kernels.lift_variant import NORMS, First
from slidesparse.layout import Columns
from slidesparse.linear import SlideLinear


def batches(most: int, firsts: Iterable[int]) -> list[int]:
    """Numbers of tokens up to ``most``: two to an octave, and those at which a layer changes its backend."""
    octaves = [m << k for k in range(most.bit_length()) for m in (1, 3)]
    return sorted({m for m in (*octaves, *firsts, most) if 0 < m <= most})


@dataclass
class Rehearsal:
    """What the layers of a model run when they are loaded, once for each kind of layer.

    Attributes:
        most: Tokens of the largest batch.
        dtype: Of the activations.
    """

    most: int
    dtype: torch.dtype
    _done: set[object] = field(default_factory=set)

    def run(self, layer: SlideLinear) -> None:
        """Run a layer, if no layer of its kind has run."""
        forms = tuple(form.describe() for form in layer.forms)
        kind = layer.in_features, layer.out_features, layer.weight_dtype, forms, layer.choice.routes
        if self._is_done(kind):
            return
        device = layer.forms[0].tensors[0].device
        if Hopper.name in layer.choice.backends:
            load_all(TILES, layer.weight_dtype, self.dtype, device.index)
        x = torch.zeros(self.most, layer.in_features, dtype=self.dtype, device=device)
        for tokens in batches(self.most, (route.first for route in layer.choice.routes)):
            layer(x[:tokens])

    def lift(self, first: str, weight: Switch, device: torch.device) -> None:
        """Run what lifts for a weight behind a norm or an activation on a GPU, if nothing of its kind has run."""
        if first == "none" or device.type != "cuda" or self._is_done((first, weight.to_text())):
            return
        from slidesparse.kernels.lift import quantize_lift

        for tokens in batches(self.most, (route.first for route in weight.routes)):
            form, _ = weight.pick(tokens)
            if not form.order:  # the torch definition
                continue
            columns, layout = Columns(*form.order), get_backend(form.backend).layout  # type: ignore[arg-type] # their number
            zeros = partial(torch.zeros, dtype=self.dtype, device=device)
            x = zeros(tokens, columns.columns * (2 if first == "silu_mul" else 1))
            quantize_lift(
                x,
                columns,
                weight.weight_dtype,
                cast("First", first),
                pairs=torch.zeros(columns.width // 2, dtype=columns.index_dtype, device=device),
                weight=zeros(columns.columns) if first in NORMS else None,
                residual=x if first == "add_rms_norm" else None,
                slabs=layout.slabs,
                rows=layout.rows(tokens) if layout.slabs is None else None,
            )

    def _is_done(self, kind: object) -> bool:
        done = kind in self._done
        self._done.add(kind)
        return done
