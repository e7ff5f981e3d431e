"""Chains: what linears in a row give as one operator, and where a graph lets them be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_links import EPS, Weight, chained, link, one_by_one
from torch.fx.experimental.proxy_tensor import make_fx

from slidesparse import InputError, SlideLinear, ops
from slidesparse.gemm.chain import links_to_text, parse_links
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.spec import Route, Switch, parse_switch
from slidesparse.integrations.vllm.fuse_chains import join, links_of
from slidesparse.linear import pack_weight
from slidesparse.pattern import Pattern
from slidesparse.prune import prune_mask

HIDDEN, WIDE, TOKENS = 48, 64, 9
SIZES = [(HIDDEN, WIDE), (2 * WIDE, HIDDEN), (HIDDEN, WIDE), (HIDDEN + 32, HIDDEN)]
"""Rows and columns of o, gate and up, down, and query, key and value."""

Results = tuple[torch.Tensor, ...]


def weight(
    out: int, columns: int, dtype: torch.dtype = torch.int8, *, biased: bool = False, large: str = "dense"
) -> Weight:
    """The last arguments of an operator: one form up to 8 tokens, another beyond."""
    dense, pattern = torch.randn(out, columns), Pattern.parse("6:8")
    packed = pack_weight(torch.where(prune_mask(dense, pattern), dense, 0), pattern, dtype)
    small, other = (SlideLinear(packed, backend=name) for name in ("reference", "dense"))
    forms = [form for layer in (small, other) for form in layer.forms]
    described, routes = tuple(form.describe() for form in forms), (Route(0, "reference"), Route(8, large))
    switch = Switch(out, parse_switch(small.switch).dtype, described, routes)
    tensors = [tensor for form in forms for tensor in form.tensors]
    return tensors, packed.scale, torch.randn(out) if biased else None, switch.to_text()


def block(tokens: int, dtype: torch.dtype = torch.int8) -> tuple[Any, ...]:
    x, residual = torch.randn(tokens, WIDE).bfloat16(), torch.randn(tokens, HIDDEN).bfloat16()
    gains = [torch.rand(HIDDEN).bfloat16() for _ in range(2)]
    return x, residual, gains, [weight(*size, dtype, biased=index == 3) for index, size in enumerate(SIZES)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [0, 7, TOKENS])
def test_a_chain_gives_the_bits_of_its_links(tokens: int, dtype: torch.dtype) -> None:
    x, residual, gains, weights = block(tokens, dtype)
    before = residual.clone()
    for got, wanted in zip(
        ops.chain(x, residual, *chained(weights, gains)), one_by_one(x, residual, gains, weights), strict=True
    ):
        assert torch.equal(got, wanted)
        assert got.dtype == wanted.dtype
    assert torch.equal(residual, before)


def test_links_of_one_backend_in_a_row_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, gains, weights = block(TOKENS)
    weights[2] = weight(*SIZES[2], large="reference")  # down, between two others and one
    first = ops.add_rms_norm_linear(ops.linear(x, *weights[0]), residual, gains[0], EPS, *weights[1])
    expected, asked = one_by_one(x, residual, gains, weights), []
    answers: list[Any] = [None, first, tuple(2 * tensor for tensor in first)]

    def chain_call(links: list[Any]) -> Any:
        asked.append([placed for _, placed in links])
        return lambda x, residual, tensors: answers.pop(0)

    monkeypatch.setattr(Dense, "chain_call", staticmethod(chain_call))
    step = ops._step
    monkeypatch.setattr(ops, "_step", lambda *sizes: step(*sizes)._replace(whole=lambda *_: None))
    ops._pieces.cache_clear()
    tensors, links = chained(weights, gains)
    for _ in range(2):  # it takes nothing, so the links run; it has done two links, and the others go on with those
        assert all(torch.equal(a, b) for a, b in zip(ops.chain(x, residual, tensors, links), expected, strict=True))
    doubled = ops.silu_mul_linear(2 * first[0], *weights[2])
    last = ops.add_rms_norm_linear(doubled, 2 * first[1], gains[1], EPS, *weights[3])
    assert all(torch.equal(a, b) for a, b in zip(ops.chain(x, residual, tensors, links), last, strict=True))
    ops._pieces.cache_clear()
    (places,) = asked  # once for three calls, and for the two in front alone; the reference form has three tensors
    assert [placed.adds for placed in places] == [False, True]
    assert all(placed.of(tensors)[0][0] is weights[i][0][3] for i, placed in enumerate(places))


def test_a_chain_keeps_its_contract() -> None:
    x, residual, gains, weights = block(TOKENS)
    torch.library.opcheck(torch.ops.slidesparse.chain.default, (x, residual, *chained(weights, gains)))


def test_links_are_text_and_back() -> None:
    _, _, gains, weights = block(1)
    _, text = chained(weights, gains)
    links = parse_links(text)
    assert links_to_text(links) == text
    assert [found.first for found in links] == ["none", "add_rms_norm", "silu_mul", "add_rms_norm"]
    assert [found.tensors - found.of_weight for found in links] == [1, 2, 1, 3]
    assert links[0] == link("none", weights[0])


def test_a_chain_must_give_a_new_residual() -> None:
    x, residual, _, weights = block(1)
    text = links_to_text([link("none", weights[0])])
    with pytest.raises(InputError, match="chain of linears"):
        ops.chain(x, residual, [*weights[0][0], weights[0][1]], text)


# -- in a graph ----------------------------------------------------------------------------------------------------


def all_four(*given: Any) -> Results:
    return one_by_one(*given)


def reads_the_first_product(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    o, gate_up, down, qkv = weights
    first = ops.linear(x, *o)
    y, total = ops.add_rms_norm_linear(first, residual, gains[0], EPS, *gate_up)
    y, total = ops.add_rms_norm_linear(ops.silu_mul_linear(y, *down), total, gains[1], EPS, *qkv)
    return y, total, first


def reads_the_residual_between(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    o, gate_up, down, qkv = weights
    y, between = ops.add_rms_norm_linear(ops.linear(x, *o), residual, gains[0], EPS, *gate_up)
    y, total = ops.add_rms_norm_linear(ops.silu_mul_linear(y, *down), between, gains[1], EPS, *qkv)
    return y, total, between


def needs_the_residual_early(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    o, gate_up, down, _ = weights
    y, total = ops.add_rms_norm_linear(ops.linear(x, *o), residual, gains[0], EPS, *gate_up)
    early = total + 1
    return ops.silu_mul_linear(y, *down), early


def ends_behind_silu(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    o, gate_up, down, _ = weights
    y, total = ops.add_rms_norm_linear(ops.linear(x, *o), residual, gains[0], EPS, *gate_up)
    return ops.silu_mul_linear(y, *down), total


def adds_its_own_product(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    o, gate_up, *_ = weights
    y = ops.linear(x, *o)
    return ops.add_rms_norm_linear(y, y, gains[0], EPS, *gate_up)


def never_adds(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    o, gate_up, down, _ = weights
    y = ops.rms_norm_linear(ops.linear(x, *o), gains[0], EPS, *gate_up)
    return (ops.silu_mul_linear(y, *down),)


def starts_with_a_norm(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    _, gate_up, down, qkv = weights
    y = ops.rms_norm_linear(residual, gains[0], EPS, *gate_up)
    return ops.add_rms_norm_linear(ops.silu_mul_linear(y, *down), residual, gains[1], EPS, *qkv)


def sums_over_gpus(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    o, gate_up, down, qkv = weights
    y = ops.linear(x, *o).neg()  # what stands there for the sum over all GPUs
    y, total = ops.add_rms_norm_linear(y, residual, gains[0], EPS, *gate_up)
    y = ops.silu_mul_linear(y, *down).neg()
    return ops.add_rms_norm_linear(y, total, gains[1], EPS, *qkv)


def two_layers(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
    y, residual = one_by_one(x, residual, gains, weights)
    return one_by_one(y[:, :WIDE] * 2, residual, gains, weights)


@pytest.mark.parametrize(
    ("model", "chains"),
    [
        (all_four, [4]),
        (reads_the_first_product, [3]),
        (reads_the_residual_between, [3]),
        (needs_the_residual_early, [2]),
        (ends_behind_silu, [3]),
        (adds_its_own_product, []),
        (never_adds, []),
        (starts_with_a_norm, [3]),
        (sums_over_gpus, [2]),
        (two_layers, [4, 4]),
    ],
)
def test_linears_in_a_row_become_one_operator(model: Callable[..., Results], chains: list[int]) -> None:
    given = block(TOKENS)
    graph_module = make_fx(model, tracing_mode="fake")(*given)
    joined = join(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    found = graph_module.graph.find_nodes(op="call_function", target=torch.ops.slidesparse.chain.default)
    assert [len(parse_links(str(node.args[-1]))) for node in found] == chains
    assert joined == sum(chains)
    wanted = make_fx(model, tracing_mode="fake")(*given).graph
    firsts = [sorted(link.first for _, link in links_of(graph)) for graph in (graph_module.graph, wanted)]
    assert firsts[0] == firsts[1]
    assert len(links_of(wanted)) >= sum(chains)
    for got, wanted in zip(graph_module(*given), model(*given), strict=True):
        assert torch.equal(got, wanted)
