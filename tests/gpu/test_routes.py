"""A layer that changes its backend with the number of tokens, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from slidesparse.gemm import Problem, choose, get_backend
from slidesparse.gemm.select import installation
from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.gemm.speed_files import add_layers
from slidesparse.layer.linear import SlideLinear
from slidesparse.weights.pattern import Pattern

pytestmark = pytest.mark.gpu

K, OUT = 333, 96
TOKENS = (1, 16, 17, 200, 1448, 1449, 2000)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table by which cuSPARSELt is the faster one from 17 to 1448 tokens."""
    problem = Problem(Pattern(6, 8), torch.int8, OUT, K, torch.device("cuda"))
    cusparselt = get_backend("cusparselt")
    if (why := cusparselt.why_not(problem)) is not None:
        pytest.skip(why)
    monkeypatch.setattr(type(cusparselt), "yields_to", lambda self, problem: None)  # these layers change their backend
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    us: dict[str, tuple[float | None, ...]] = {
        "dense": (1.0,) * 4,
        "hopper 6:8": (None,) * 4,
        "ampere 6:8": (None,) * 4,
    }
    us["cusparselt 6:8"] = 2.0, 0.5, 0.5, 2.0
    add_layers(installation(), [LayerSpeed(dtype, OUT, K, (8, 32, 512, 4096), us) for dtype in ("int8", "fp8", "bf16")])


def _layers(dtype: str) -> tuple[SlideLinear, SlideLinear]:
    torch.manual_seed(1)
    linear = nn.Linear(K, OUT).to(torch.bfloat16).cuda()
    routed = SlideLinear.from_linear(linear, "6:8", dtype, method="magnitude")
    return routed, SlideLinear.from_linear(linear, "6:8", dtype, method="magnitude", backend="dense")


def test_the_choice_is_the_tables() -> None:
    routed, _ = _layers("int8")
    assert routed.choice.routes == (Route(0, "dense"), Route(17, "cusparselt"), Route(1449, "dense"))
    assert set(routed.operand_bytes) == {"dense", "cusparselt"}
    problem = Problem(Pattern(6, 8), torch.int8, OUT, K, torch.device("cuda"))
    assert choose(problem, fallback="none").backends == ("cusparselt",)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_eager_compiled_and_captured_agree_with_dense(dtype: str) -> None:
    torch._dynamo.reset()
    routed, dense = _layers(dtype)
    compiled = torch.compile(routed, fullgraph=True, dynamic=True)
    for m in TOKENS:
        x = torch.randn(m, K, dtype=torch.bfloat16, device="cuda")
        y, expected = routed(x), dense(x)
        if dtype == "int8":
            assert torch.equal(y, expected)
        else:
            # Two rounded sums of the same products in two orders; FP8 also sums with 13 bits.
            assert float((y - expected).abs().max()) <= 2**-6 * float(expected.abs().max())
        assert torch.equal(compiled(x), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = routed(x)
        captured.fill_(7)
        graph.replay()
        assert torch.equal(captured, y)
