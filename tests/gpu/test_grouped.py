"""The grouped product on a Hopper GPU: INT8 has the bits of the definition, whatever the routing, in graphs too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import by_magnitude
from expert_weights import packed_experts, routed
from gpu_products import assert_same_every_time, needs_hopper
from small_mixtures import MIXTURES, packed_mixtures, spread_experts
from small_models import make

import slidesparse
from slidesparse.base.triton_launcher import Launcher
from slidesparse.gemm.grouped import GroupedProduct
from slidesparse.gemm.hopper.choose_tiles import DENSE_GROUPED_TILES, GROUPED_TILES
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.layer.experts import SlideExperts
from slidesparse.lifting.choose import TorchLift
from slidesparse.lifting.expert_order import arrange
from slidesparse.lifting.layout import Lifted, LiftSpec, LinearTensors
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import Rounding

pytestmark = [pytest.mark.gpu, needs_hopper]

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
EXPERTS, HIDDEN, INNER = 8, 512, 384

ROUTINGS = {
    "even": lambda: routed(200, EXPERTS, 2, "cuda"),
    "one token": lambda: routed(1, EXPERTS, 2, "cuda"),
    "all to one": lambda: torch.full((300, 1), 5, device="cuda"),
    "experts without tokens": lambda: torch.randint(2, 4, (77, 1), device="cuda"),
    "experts elsewhere": lambda: torch.randint(-2, EXPERTS, (50, 3), device="cuda").clamp(min=-1),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=GROUPED_TILES, ids=str)
def tile(request: pytest.FixtureRequest) -> Tile:
    chosen: Tile = request.param
    return chosen


def products(
    dtype: torch.dtype, pattern: str, tile: Tile, chosen: torch.Tensor, out: int = 320, rounding: Rounding = "absmax"
) -> list[torch.Tensor]:
    """The products of the kernel and of the definition, on the rows that have a token."""
    experts = packed_experts(EXPERTS, out, HIDDEN, dtype, pattern, "cuda", rounding=rounding)
    at = arrange(chosen, EXPERTS, tile.tokens)
    x, scale = torch.randn(len(at.tokens), HIDDEN, device="cuda", dtype=BF16), torch.stack([p.scale for p in experts])
    here = at.rows[at.rows >= 0]
    found = []
    for product in (HopperExperts(), GroupedProduct()):
        lift = TorchLift(LiftSpec("none", BF16, dtype, (), product.layout))
        tensors = LinearTensors(product.layout.column_map(experts[0]), (), None, None, None)
        lifted: Lifted = lift(x, None, tensors, 0.0)
        y = product.multiply(lifted, product.prepare(experts), scale.contiguous(), at, BF16, tile)
        found.append(y[here])
    return found


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8"])
@pytest.mark.parametrize("rounding", ["absmax", "6bit"])
def test_int8_has_the_bits_of_the_definition(rounding: Rounding, pattern: str, routing: str, tile: Tile) -> None:
    ours, exact = products(INT8, pattern, tile, ROUTINGS[routing](), rounding=rounding)
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dense_tile", DENSE_GROUPED_TILES, ids=str)
def test_dense_six_bits_have_the_bits_of_the_definition(routing: str, dense_tile: Tile) -> None:
    ours, exact = products(INT8, "dense", dense_tile, ROUTINGS[routing](), rounding="6bit")
    assert torch.equal(ours, exact)


def test_a_layer_of_dense_six_bits_is_that_of_torch() -> None:
    sizes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    both = [packed_experts(EXPERTS, *size, INT8, "dense", "cuda", rounding="6bit") for size in sizes]
    chosen = ROUTINGS["even"]()
    x, weights = torch.randn(len(chosen), HIDDEN, device="cuda", dtype=BF16), torch.rand(chosen.shape, device="cuda")
    ours, exact = (SlideExperts(*both, product)(x, weights, chosen) for product in (HopperExperts(), None))
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("out", [64, 100, 1536])
def test_any_number_of_outputs(out: int, tile: Tile) -> None:
    ours, exact = products(INT8, "4:6", tile, ROUTINGS["even"](), out)
    assert torch.equal(ours, exact)


def test_fp8_is_near_the_definition(tile: Tile) -> None:
    ours, exact = products(FP8, "6:8", tile, ROUTINGS["even"]())
    assert (ours - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_layer_is_that_of_torch(dtype: torch.dtype, routing: str) -> None:
    linears, chosen = both_linears(dtype), ROUTINGS[routing]()
    x, weights = torch.randn(len(chosen), HIDDEN, device="cuda", dtype=BF16), torch.rand(chosen.shape, device="cuda")
    layer = SlideExperts(*linears, HopperExperts())
    ours, exact = layer(x, weights, chosen), SlideExperts(*linears)(x, weights, chosen)
    assert_same_every_time(lambda: layer(x, weights, chosen), 100)
    if dtype == INT8:
        assert torch.equal(ours, exact)
    assert (ours - exact).float().norm() <= 2e-2 * exact.float().norm()


def both_linears(dtype: torch.dtype) -> tuple[list[PackedWeight], list[PackedWeight]]:
    """Gate and up, and down, of all experts."""
    sizes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    gate_up, down = (packed_experts(EXPERTS, *size, dtype, "6:8", "cuda") for size in sizes)
    return gate_up, down


def test_a_graph_follows_the_routing() -> None:
    linears = both_linears(INT8)
    layer, eager = SlideExperts(*linears, HopperExperts()), SlideExperts(*linears)
    x, weights = torch.randn(64, HIDDEN, device="cuda", dtype=BF16), torch.rand(64, 2, device="cuda")
    chosen = routed(64, EXPERTS, 2, "cuda")
    layer(x, weights, chosen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, weights, chosen)
    for _ in range(3):
        chosen.copy_(routed(64, EXPERTS, 2, "cuda"))
        x.normal_()
        graph.replay()
        assert torch.equal(y, eager(x, weights, chosen))


def test_nothing_is_compiled_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SlideExperts(*both_linears(INT8), HopperExperts())
    layer.warm_up(BF16, 2)
    layer.product.warm_up(INT8, BF16, [layer.gate_up.weights, layer.down.weights])

    def compiles(*_: object) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(Launcher, "compile_and_launch", compiles)
    for tokens in (1, 16, 200, 300, 2000, 5000):
        x, weights = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16), torch.rand(tokens, 2, device="cuda")
        layer(x, weights, routed(tokens, EXPERTS, 2, "cuda"))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_loaded_mixture_runs_packed_experts(tmp_path: Path, dtype: str) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2}
    model = make(tmp_path / "m", MIXTURES["qwen3-moe"], **sizes)
    spread_experts(model)
    model.save_pretrained(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", dtype))
    ours = slidesparse.load(tmp_path / "s", device="cuda", tune="off")
    exact = slidesparse.load(tmp_path / "s", device="cuda", backend="reference")
    pairs = list(zip(packed_mixtures(ours), packed_mixtures(exact), strict=True))
    assert pairs
    same_inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for one, other in pairs:
        assert isinstance(one.slide.product, HopperExperts)
        one.register_forward_hook(lambda _, given, y, other=other: same_inputs.append((y, other(*given))))
    tokens = torch.randint(3, 90, (2, 11), device="cuda")
    with torch.no_grad():
        found = [(ours(tokens).logits, exact(tokens).logits), *same_inputs]
    assert len(same_inputs) == len(pairs)
    # An FP8 value that rounds otherwise may send a token to another expert of the next layer.
    of_logits = {"int8": 5e-2, "fp8": 0.1}[dtype]
    for (y, wanted), most in zip(found, (of_logits, *[2e-2] * len(pairs)), strict=True):
        assert (y - wanted).float().norm() < most * wanted.float().norm()
