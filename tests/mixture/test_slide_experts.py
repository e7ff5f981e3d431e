"""The experts of a layer against each expert alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expert_weights import one_by_one, packed_experts, routed

from slidesparse import InputError, UnsupportedError
from slidesparse.gemm.grouped import GroupedProduct, Rows, TokenTile
from slidesparse.layer.experts import SlideExperts, split_rows
from slidesparse.lifting.expert_order import Arrangement
from slidesparse.lifting.layout import Lifted
from slidesparse.weights.packed import pack_by

INT8, FP8 = torch.int8, torch.float8_e4m3fn
HIDDEN, INNER, EXPERTS = 48, 32, 5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def experts(dtype: torch.dtype = INT8, pattern: str = "6:8", k_offset: int = 0):
    gate_up = packed_experts(EXPERTS, 2 * INNER, HIDDEN, dtype, pattern)
    return gate_up, packed_experts(EXPERTS, HIDDEN, INNER, dtype, pattern, k_offset=k_offset)


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10"])
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_it_computes_what_each_expert_does(dtype: torch.dtype, pattern: str) -> None:
    gate_up, down = experts(dtype, pattern)
    x, chosen, weights = torch.randn(11, HIDDEN, dtype=torch.bfloat16), routed(11, EXPERTS, 3), torch.rand(11, 3)
    y = SlideExperts(gate_up, down)(x, weights, chosen)
    expected = one_by_one(x, weights, chosen, gate_up, down)
    if dtype == INT8:
        assert torch.equal(y, expected)
    else:  # float32 sums over slid columns, in another order
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    "chosen",
    [
        torch.tensor([[3]]),  # one token
        torch.full((9, 1), 2),  # all to one expert
        torch.tensor([[0, -1], [-1, -1], [4, 0]]),  # experts that are elsewhere
    ],
)
def test_routings(chosen: torch.Tensor) -> None:
    gate_up, down = experts()
    x, weights = torch.randn(len(chosen), HIDDEN), torch.rand(chosen.shape)
    y = SlideExperts(gate_up, down)(x, weights, chosen)
    assert torch.equal(y, one_by_one(x, weights, chosen, gate_up, down))


def test_experts_follow_the_quantiser_that_they_are_given() -> None:
    x = torch.arange(-HIDDEN, HIDDEN, dtype=torch.float32).view(2, HIDDEN) / 2
    x[:, 0] = 127
    given, weights = (x, torch.rand(2, 3), routed(2, EXPERTS, 3)), experts()
    expected = one_by_one(*given, *weights, "sglang")
    assert not torch.equal(expected, one_by_one(*given, *weights))
    assert torch.equal(SlideExperts(*weights, activation_rounding="sglang")(*given), expected)


class Counting(GroupedProduct):
    """The definition, which keeps what it is asked for."""

    def __init__(self) -> None:
        self.pairs: list[int] = []
        self.tokens: list[int] = []

    def tiles(self, pairs: int, operands: Sequence[torch.Tensor], out_features: Sequence[int]) -> tuple[Rows, ...]:
        self.pairs.append(pairs)
        return super().tiles(pairs, operands, out_features)

    def multiply(
        self,
        x: Lifted,
        operand: torch.Tensor,
        scale: torch.Tensor,
        at: Arrangement,
        out_dtype: torch.dtype,
        tile: TokenTile,
    ) -> torch.Tensor:
        self.tokens.append(int((at.tokens >= 0).sum()))
        return super().multiply(x, operand, scale, at, out_dtype, tile)


def test_the_experts_of_two_gpus_are_those_of_one() -> None:
    gate_up, down = experts()
    x, chosen, weights = torch.randn(16, HIDDEN), routed(16, EXPERTS, 3), torch.rand(16, 3)
    total = torch.zeros(16, HIDDEN)
    for own in (range(2), range(2, EXPERTS)):
        places = torch.full((EXPERTS,), -1, dtype=torch.int32)
        places[list(own)] = torch.arange(len(own), dtype=torch.int32)
        product = Counting()
        parts = [gate_up[e] for e in own], [down[e] for e in own]
        total += SlideExperts(*parts, product, everywhere=EXPERTS)(x, weights, places[chosen.long()])
        assert product.pairs == [-(-48 * len(own) // EXPERTS)]  # tiles for the pairs to be expected here
        here = int(sum((chosen == e).sum() for e in own))
        assert product.tokens == [here, here]  # rows of its own pairs alone are prepared
    torch.testing.assert_close(total, SlideExperts(gate_up, down)(x, weights, chosen))


def test_a_shard_begins_within_a_group() -> None:
    gate_up, down = experts(k_offset=4)
    x, chosen, weights = torch.randn(4, HIDDEN), routed(4, EXPERTS, 2), torch.rand(4, 2)
    assert torch.equal(SlideExperts(gate_up, down)(x, weights, chosen), one_by_one(x, weights, chosen, gate_up, down))


def test_no_token_is_no_work() -> None:
    made = SlideExperts(*experts())
    y = made(torch.randn(0, HIDDEN), torch.rand(0, 2), torch.zeros(0, 2, dtype=torch.int32))
    assert y.shape == (0, HIDDEN)


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = experts()
    for wrong, says in (
        ((gate_up, down[:-1]), "as many of"),
        (([*gate_up[:-1], *packed_experts(1, 2 * INNER, HIDDEN + 8, INT8)], down), "got 2 kinds; needed one size"),
        (
            ([*gate_up[:-1], *packed_experts(1, 2 * INNER, HIDDEN, INT8, "4:6")], down),
            "got 4:6, 6:8; needed one",
        ),
        ((packed_experts(EXPERTS, 2 * INNER, HIDDEN, INT8, "dense"), down), "got dense; needed one pattern"),
    ):
        with pytest.raises((InputError, UnsupportedError), match=says):
            SlideExperts(*wrong)


def test_experts_may_be_packed_as_one() -> None:
    alone = packed_experts(3, 16, HIDDEN, INT8)
    weight, scale = torch.cat([one.unpack() for one in alone]), torch.cat([one.scale for one in alone])
    for one, part in zip(alone, split_rows(pack_by(weight, "6:8", scale=scale), 3), strict=True):
        assert part.shape == one.shape
        assert torch.equal(part.unpack(), one.unpack())
        assert torch.equal(part.columns(), one.columns())
        assert torch.equal(part.scale, one.scale)
    with pytest.raises(InputError, match="rows of experts packed as one; got 48"):
        split_rows(pack_by(weight, "6:8", scale=scale), 5)


# -- inference -------------------------------------------------------------------------------------------------------


def tokens_to_run(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What the layer is called with."""
    return {"x": torch.randn(9, HIDDEN, dtype=dtype), "weights": torch.rand(9, 2), "chosen": routed(9, EXPERTS, 2)}


@pytest.mark.parametrize("trained", ["x", "weights"])
def test_a_gradient_is_refused_in_the_backward_pass(trained: str) -> None:
    made, tokens = SlideExperts(*experts()), tokens_to_run()
    expected = made(**tokens)
    tokens[trained].requires_grad_()
    y = made(**tokens)
    assert torch.equal(y, expected)
    with pytest.raises(UnsupportedError, match="for inference"):
        y.sum().backward()
    with pytest.raises(UnsupportedError, match="for inference"):
        made(tokens["x"][:0], tokens["weights"][:0], tokens["chosen"][:0]).sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_joins_a_graph(mode: Callable[[], Any]) -> None:
    made, tokens = SlideExperts(*experts()), tokens_to_run()
    tokens["x"].requires_grad_()
    with mode():
        y = made(**tokens)
    assert not y.requires_grad
    assert not made(**tokens_to_run()).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_experts_refuse_gradients_too(compiler: str) -> None:
    torch._dynamo.reset()
    made, tokens = SlideExperts(*experts()), tokens_to_run()
    expected, run = made(**tokens), torch.compile(made, backend=compiler)
    with torch.no_grad():
        assert torch.equal(run(**tokens), expected)
    tokens["x"].requires_grad_()
    y = run(**tokens)
    assert torch.equal(y, expected)
    with pytest.raises(UnsupportedError, match="for inference"):
        y.sum().backward()


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_autocast_changes_no_bit(dtype: torch.dtype, given: torch.dtype) -> None:
    made, tokens = SlideExperts(*experts(dtype)), tokens_to_run(given)
    expected = made(**tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = made(**tokens)
        trained = made(tokens["x"].requires_grad_(), tokens["weights"], tokens["chosen"])
    assert y.dtype == given
    assert torch.equal(y, expected)
    assert torch.equal(trained, expected)
