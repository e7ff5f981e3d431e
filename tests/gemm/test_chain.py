"""Chains: what linears in a row give as one operator, and where a graph lets them be one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chained_linears import EPS, Weight, chained, linear_spec, one_by_one
from torch.fx.experimental.proxy_tensor import make_fx

from slidesparse import InputError, SlideLinear, ops
from slidesparse.gemm import get_backend
from slidesparse.gemm.backend import LiftThenMultiply, OneByOne
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.spec import FormSpec, Route, Slots, WeightSpec, chain_text, parse_chain, parse_weight
from slidesparse.integrations.vllm.fuse_chains import find_linears, join_chains
from slidesparse.lifting.choose import TorchLift
from slidesparse.lifting.layout import LiftSpec
from slidesparse.ops.resolve import resolve_chain, resolve_linear
from slidesparse.pruning import prune_mask
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import Pattern

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
    specs, routes = tuple(form.spec() for form in forms), (Route(0, "reference"), Route(8, large))
    spec = WeightSpec(out, parse_weight(small.spec).dtype, specs, routes)
    tensors = [tensor for form in forms for tensor in form.tensors]
    return tensors, packed.scale, torch.randn(out) if biased else None, spec.text


def block(tokens: int, dtype: torch.dtype = torch.int8) -> tuple[Any, ...]:
    x, residual = torch.randn(tokens, WIDE).bfloat16(), torch.randn(tokens, HIDDEN).bfloat16()
    gains = [torch.rand(HIDDEN).bfloat16() for _ in range(2)]
    return x, residual, gains, [weight(*size, dtype, biased=index == 3) for index, size in enumerate(SIZES)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [0, 7, TOKENS])
def test_a_chain_gives_the_bits_of_its_linears(tokens: int, dtype: torch.dtype) -> None:
    x, residual, gains, weights = block(tokens, dtype)
    before = residual.clone()
    for got, wanted in zip(
        ops.chain(x, residual, *chained(weights, gains)), one_by_one(x, residual, gains, weights), strict=True
    ):
        assert torch.equal(got, wanted)
        assert got.dtype == wanted.dtype
    assert torch.equal(residual, before)


def test_linears_of_one_backend_in_a_row_have_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, gains, weights = block(TOKENS)
    weights[2] = weight(*SIZES[2], large="reference")  # down, between two others and one
    before = ops.add_rms_norm_linear(ops.linear(x, *weights[0]), residual, gains[0], EPS, *weights[1])
    asked: list[list[Slots]] = []

    class Doubled(OneByOne):
        """What the first two give, doubled."""

        def __call__(self, *given: Any) -> Any:
            y, total = super().__call__(*given)
            return (y, total) if len(self.linears) == 1 else (2 * y, 2 * total)

    def chain_runner(self: Dense, linears: list[Any]) -> OneByOne:
        asked.append([slots for _, slots in linears])
        return Doubled(linears)

    monkeypatch.setattr(Dense, "chain_runner", chain_runner)
    resolve_chain.cache_clear()
    tensors, text = chained(weights, gains)
    doubled = ops.silu_mul_linear(2 * before[0], *weights[2])
    last = ops.add_rms_norm_linear(doubled, 2 * before[1], gains[1], EPS, *weights[3])
    for _ in range(2):  # the others go on with what the first two gave
        assert all(torch.equal(a, b) for a, b in zip(ops.chain(x, residual, tensors, text), last, strict=True))
    resolve_chain.cache_clear()
    first, alone = asked  # once for two calls
    assert [slots.adds for slots in first] == [False, True]
    assert [slots.adds for slots in alone] == [True]
    for slots, given in zip((*first, *alone), (weights[0], weights[1], weights[3]), strict=True):
        picked = slots.pick(tensors)
        assert picked.column_map is given[0][2]  # the reference form has two tensors
        assert picked.scale is given[1]
        assert picked.bias is given[2]
    assert [slots.pick(tensors).norm_weight for slots in first] == [None, gains[0]]


@pytest.mark.parametrize("name", ["reference", "dense", "hopper", "hopper-6bit", "ampere", "cusparselt"])
def test_a_backend_without_a_faster_way_lifts_then_multiplies(name: str) -> None:
    backend = get_backend(name)
    # The faster ways need the kernel's.
    lift = TorchLift(LiftSpec("none", torch.bfloat16, torch.int8, (), backend.layout))
    runner = backend.runner(lift, 8)
    assert type(runner) is LiftThenMultiply
    assert (runner.backend, runner.lift, runner.out_features) == (backend, lift, 8)
    slots = Slots(range(3), None, None, None, False, 0.0)
    assert type(backend.chain_runner([(runner, slots), (runner, slots)])) is OneByOne


def test_a_linear_is_resolved_once_for_a_number_of_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="slidesparse")
    x, _, _, weights = block(TOKENS)
    resolve_linear.cache_clear()
    for tokens in (TOKENS, TOKENS, 3):
        ops.linear(x[:tokens], *weights[0])
    assert caplog.messages == [
        f"{TOKENS} tokens, {HIDDEN} outputs, int8: dense, lift then multiply",
        f"3 tokens, {HIDDEN} outputs, int8: reference, lift then multiply",
    ]


def test_a_chain_keeps_its_contract() -> None:
    x, residual, gains, weights = block(TOKENS)
    torch.library.opcheck(torch.ops.slidesparse.chain.default, (x, residual, *chained(weights, gains)))


def test_a_chain_is_text_and_back() -> None:
    _, _, gains, weights = block(1)
    _, text = chained(weights, gains)
    linears = parse_chain(text)
    assert chain_text(linears) == text
    assert [found.prologue for found in linears] == ["none", "add_rms_norm", "silu_mul", "add_rms_norm"]
    assert [found.tensors - found.weight.tensors for found in linears] == [1, 2, 1, 3]
    assert linears == tuple(linear_spec(found.prologue, given) for found, given in zip(linears, weights, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.update(prologue="gelu"),
        lambda linear: linear.pop("scaled"),
        lambda linear: linear["weight"]["routes"][0].update(from_tokens=True),
    ],
)
def test_a_text_that_is_no_chain_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    x, residual, gains, weights = block(1)
    tensors, text = chained(weights, gains)
    linears = json.loads(text)
    change(linears[1])
    with pytest.raises(InputError, match=r"spec of a chain\[1\]"):
        ops.chain(x, residual, tensors, json.dumps(linears))


@pytest.mark.parametrize("text", ["", "[NaN]", '{"dtype": "int8", "dtype": "fp8"}'])
def test_a_text_that_is_no_json_is_refused(text: str) -> None:
    for parse in (parse_weight, parse_chain):
        with pytest.raises(InputError):
            parse(text)


@pytest.mark.parametrize("routes", [(), (Route(1, "dense"),), (Route(0, "dense"), Route(9, "hopper"))])
def test_a_spec_has_a_form_for_every_number_of_tokens(routes: tuple[Route, ...]) -> None:
    with pytest.raises(InputError):
        WeightSpec(48, "int8", (FormSpec("dense", (), 3),), routes)


def test_a_chain_must_give_a_new_residual() -> None:
    x, residual, _, weights = block(1)
    text = chain_text([linear_spec("none", weights[0])])
    with pytest.raises(InputError):
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


def ends_after_silu(x: Any, residual: Any, gains: Any, weights: Any) -> Results:
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
        (ends_after_silu, [3]),
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
    joined = join_chains(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    found = graph_module.graph.find_nodes(op="call_function", target=torch.ops.slidesparse.chain.default)
    assert [len(parse_chain(str(node.args[-1]))) for node in found] == chains
    assert joined == sum(chains)
    wanted = make_fx(model, tracing_mode="fake")(*given).graph
    prologues = [sorted(linear.prologue for _, linear in find_linears(graph)) for graph in (graph_module.graph, wanted)]
    assert prologues[0] == prologues[1]
    assert len(find_linears(wanted)) >= sum(chains)
    for got, wanted in zip(graph_module(*given), model(*given), strict=True):
        assert torch.equal(got, wanted)
