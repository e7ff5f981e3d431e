"""The experts of a layer: gate and up, SiLU * up, down, and the sum over the experts of each token.

Two grouped products run them: rows are quantised and lifted in the order of their experts, SiLU * up is part of the
second lift, and one kernel sums the products of a token in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from slidesparse.base.device import runs_triton
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.grouped import GroupedOperand, GroupedProduct, TokenTile
from slidesparse.lifting.expert_lift import lift_routed
from slidesparse.lifting.expert_order import Arrangement, arrange, rows_needed
from slidesparse.lifting.expert_sum import weighted_sum
from slidesparse.lifting.layout import Lifted, LiftSpec
from slidesparse.lifting.prologue import Prologue
from slidesparse.ops.inference_only import no_backward
from slidesparse.weights.packed import PackedWeight, common_bits
from slidesparse.weights.quant import FLOATS, ActivationRounding


class ExpertLinear(nn.Module):
    """One linear of all experts, as a product reads it.

    Args:
        experts: Packed weights of one size, type and pattern.
        product: The grouped product.
        activation_rounding: As of :class:`SlideExperts`.
    """

    operand: torch.Tensor
    scale: torch.Tensor
    column_map: torch.Tensor

    def __init__(
        self, experts: Sequence[PackedWeight], product: GroupedProduct, activation_rounding: ActivationRounding = "vllm"
    ) -> None:
        super().__init__()
        first = experts[0]
        order = product.layout.order(first)
        self.out_features, self.in_features = first.shape
        self.dtype, self.product, self.activation_rounding = first.dtype, product, activation_rounding
        self._order = () if order is None else tuple(order.numbers)
        scales = [packed.scale for packed in experts if packed.scale is not None]
        operand, self._form = product.prepare(experts)
        self.register_buffer("operand", operand, persistent=False)
        self.register_buffer("scale", torch.stack(scales).reshape(len(experts), -1).contiguous(), persistent=False)
        self.register_buffer("column_map", product.layout.column_map(first), persistent=False)

    @property
    def weights(self) -> GroupedOperand:
        """The weights in the product's layout."""
        return GroupedOperand(self.operand, self._form)

    def lift(self, x: torch.Tensor, arrangement: Arrangement, prologue: Prologue, *, gather: bool) -> Lifted:
        """Quantise and lift the token of every row, or the rows; see :func:`lifting.expert_lift.lift_routed`."""
        spec = LiftSpec(prologue, x.dtype, self.dtype, self._order, self.product.layout, self.activation_rounding)
        return lift_routed(x, arrangement, self.column_map, spec, gather=gather)

    def multiply(self, x: Lifted, arrangement: Arrangement, out_dtype: torch.dtype, tile: TokenTile) -> torch.Tensor:
        """Return the product [P, N]; see :class:`slidesparse.gemm.grouped.GroupedProduct`."""
        return self.product.multiply(x, self.weights, self.scale, arrangement, out_dtype, tile)


class SlideExperts(nn.Module):
    """The experts of a layer of a mixture, packed; routers, shared experts and norms are not part of it.

    Args:
        gate_up: The packed weight [2I, H] of every expert, gate first.
        down: The packed weight [H, I] of every expert.
        product: The grouped product; None: the definition in torch.
        everywhere: Number of experts on all GPUs; None: all are here.
        activation_rounding: The server whose rounding of activations is reproduced, as of
            :class:`slidesparse.layer.linear.SlideLinear`.

    Raises:
        InputError: No expert, sizes that do not fit each other, or weights that are not quantised.
        UnsupportedError: Experts of a layer with different patterns, or dense ones: they share the lifted tokens.
    """

    def __init__(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        product: GroupedProduct | None = None,
        everywhere: int | None = None,
        activation_rounding: ActivationRounding = "vllm",
    ) -> None:
        super().__init__()
        self.product = GroupedProduct() if product is None else product
        for name, experts in (("gate and up", gate_up), ("down", down)):
            _check_alike(name, experts)
        (out, hidden), inner = gate_up[0].shape, down[0].shape[1]
        if len(gate_up) != len(down) or out != 2 * inner or down[0].shape[0] != hidden:
            raise InputError(
                "experts",
                got=f"{len(gate_up)} of {[out, hidden]}, {len(down)} of {list(down[0].shape)}",
                needed="as many of [2I, H] as of [H, I]",
            )
        self.count, self.hidden = len(gate_up), hidden
        self.everywhere = self.count if everywhere is None else everywhere
        self.gate_up, self.down = (ExpertLinear(each, self.product, activation_rounding) for each in (gate_up, down))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return ``sum over k of weights[t, k] * expert[chosen[t, k]](x[t])``.

        Args:
            x: [M, H], bfloat16, float16 or float32.
            weights: [M, k], of the router.
            chosen: Integers [M, k], the experts of every token; negative where one is not here.

        Returns:
            [M, H] in x's type, under ``torch.autocast`` too. A backward pass through it is an error.

        Raises:
            InputError: Sizes that do not fit each other, or another type of x.
        """
        rows = x.dim() == 2 and x.shape[1] == self.hidden
        if not rows or chosen.shape[:1] != x.shape[:1] or weights.shape != chosen.shape:
            raise InputError(
                "tokens of a mixture",
                got=f"{list(x.shape)}, experts {list(chosen.shape)}, weights {list(weights.shape)}",
                needed=f"[M, {self.hidden}], [M, k], [M, k]",
            )
        if x.dtype not in FLOATS:
            raise InputError("tokens of a mixture", got=x.dtype, needed="bf16, fp16 or fp32")
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return no_backward(self._sum, x, weights, chosen)
        return no_backward(self._sum, x, weights, chosen)

    def _sum(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        if not chosen.numel():
            return torch.zeros_like(x)
        first, second = self.tiles(chosen.numel())
        arrangement = _arranged(chosen, self.count, first.tokens)
        lifted = self.gate_up.lift(x, arrangement, "none", gather=True)
        inner = self.gate_up.multiply(lifted, arrangement, x.dtype, first)
        lifted = self.down.lift(inner, arrangement, "silu_mul", gather=False)
        outer = self.down.multiply(lifted, arrangement, x.dtype, second)
        return weighted_sum(outer, arrangement.rows, weights.to(torch.float32).contiguous())

    def warm_up(self, dtype: torch.dtype, top_k: int) -> None:
        """Compile the layer's Triton kernels for all numbers of tokens, by running tokens of this type.

        There are two variants of lifts, up to :data:`~slidesparse.lifting.launch.FEW_TOKENS` rows and beyond, and two
        ways to order pairs. The activations of the larger batch take some tens of MB.
        """
        device = self.gate_up.operand.device
        if not runs_triton(device):
            return
        from slidesparse.lifting.expert_order_kernel import FEW_PAIRS
        from slidesparse.lifting.launch import FEW_TOKENS

        for pairs in (1, FEW_TOKENS + 1, FEW_PAIRS + 1):
            tokens = -(-pairs // top_k)
            chosen = torch.arange(tokens * top_k, dtype=torch.int32, device=device).view(tokens, top_k) % self.count
            if pairs > FEW_PAIRS:
                _arranged(chosen, self.count, self.tiles(chosen.numel())[0].tokens)
            else:
                x = torch.zeros(tokens, self.hidden, dtype=dtype, device=device)
                self(x, torch.ones(tokens, top_k, device=device), chosen)

    def tiles(self, pairs: int) -> Sequence[TokenTile]:
        """Return the tiles of both products for a number of pairs, with one number of tokens.

        Where some experts are elsewhere, tiles suit the expected pairs here.
        """
        linears = (self.gate_up, self.down)
        operands, outs = [linear.weights for linear in linears], [linear.out_features for linear in linears]
        return self.product.tiles(-(-pairs * self.count // self.everywhere), operands, outs)


def _arranged(chosen: torch.Tensor, experts: int, tile: int) -> Arrangement:
    """Return :func:`slidesparse.lifting.expert_order.arrange`, by kernels if they can count all experts."""
    if runs_triton(chosen.device) and not chosen.dtype.is_floating_point:
        from slidesparse.lifting import expert_order_kernel

        rows = rows_needed(chosen.numel(), experts, tile)
        if experts <= expert_order_kernel.MOST_EXPERTS:
            return Arrangement(*expert_order_kernel.arrange(chosen.contiguous(), experts, tile, rows))
    return arrange(chosen, experts, tile)


def split_rows(packed: PackedWeight, count: int) -> list[PackedWeight]:
    """Return the weights of experts that were packed as one, [count * out, K], without copies.

    Raises:
        InputError: The rows do not divide.
    """
    rows, columns = packed.shape
    if count < 1 or rows % count:
        raise InputError("rows of experts packed as one", got=rows, needed=f"a multiple of {count}")
    out = rows // count

    def part(expert: int) -> PackedWeight:
        own = slice(expert * out, (expert + 1) * out)
        code, scale = (None if part is None else part[own] for part in (packed.code, packed.scale))
        return replace(packed, shape=(out, columns), values=packed.values[own], code=code, scale=scale)

    return [part(expert) for expert in range(count)]


def _check_alike(name: str, experts: Sequence[PackedWeight]) -> None:
    if not experts or any(packed.scale is None for packed in experts):
        raise InputError(f"{name} of experts", got=f"{len(experts)} weights", needed="packed INT8 or FP8 weights")
    kinds = {(packed.shape, packed.dtype, packed.k_offset) for packed in experts}
    if len(kinds) > 1:
        raise InputError(f"{name} of experts", got=f"{len(kinds)} kinds", needed="one size, type and offset")
    patterns = {str(packed.pattern) for packed in experts}
    if len(patterns) > 1 or not (experts[0].slid or common_bits(experts) == 6):
        raise UnsupportedError(
            f"{name} of experts that share their lifted tokens",
            got=", ".join(sorted(patterns)),
            needed="one pattern, such as 6:8",
            remedy="prune all experts of a layer to one pattern",
        )
