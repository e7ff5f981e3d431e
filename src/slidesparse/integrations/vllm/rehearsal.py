"""A layer runs batches of many sizes when it is loaded, so that little is compiled or planned while vLLM serves.

vLLM itself runs the largest batch, and those that it captures; that is where what joins norms and activations with a
layer is compiled. Between them lie batches for which a backend has other tiles or plans, and the first of them would
make a user wait. All tiles of the Hopper kernel are loaded, whatever batches would choose them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from slidesparse.gemm.hopper import Hopper
from slidesparse.gemm.hopper_launch import load_all
from slidesparse.gemm.hopper_tiles import TILES
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
        if kind in self._done:
            return
        self._done.add(kind)
        device = layer.forms[0].tensors[0].device
        if Hopper.name in layer.choice.backends:
            load_all(TILES, layer.weight_dtype, self.dtype, device.index)
        x = torch.zeros(self.most, layer.in_features, dtype=self.dtype, device=device)
        for tokens in batches(self.most, (route.first for route in layer.choice.routes)):
            layer(x[:tokens])
