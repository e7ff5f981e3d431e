"""What the plugin's pass makes of the graphs that vLLM compiles, and the key under which vLLM keeps them; no GPU."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from vllm_models import REFERENCE, configured, loaded_by

import slidesparse as ss
from slidesparse.integrations.vllm.fuse_chains import join_chains
from slidesparse.integrations.vllm.fuse_norms import Joins, join_norms
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.options import Options
from slidesparse.integrations.vllm.private import POST_PASS
from slidesparse.integrations.vllm.status import Outcome

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


def sparse_linear(out: int, columns: int, pattern: str = "6:8") -> ss.SlideLinear:
    linear = torch.nn.Linear(columns, out, bias=False)
    backend = "dense" if pattern == "dense" else "reference"
    return ss.SlideLinear.from_linear(linear, pattern, "int8", method="magnitude", backend=backend)


class Block(torch.nn.Module):
    """What stands around the linears of a decoder layer, as vLLM's compiled graph has it."""

    def __init__(self, reads_twice: bool, patterns: Sequence[str] = ("6:8", "6:8", "6:8", "6:8")) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (96, 64), (64, 96), (256, 64), (64, 128)
        linears = (sparse_linear(*size, pattern) for size, pattern in zip(sizes, patterns, strict=True))
        self.qkv, self.o, self.gate_up, self.down = linears
        self.gains = torch.nn.ParameterList(torch.rand(64).bfloat16() for _ in range(2))
        self.reads_twice = reads_twice

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from vllm.model_executor.layers.activation import SiluAndMul

        normed = torch.ops.vllm_ir.rms_norm(x, self.gains[0], 1e-6)
        y = self.o(self.qkv(normed))
        y, residual = torch.ops.vllm_ir.fused_add_rms_norm(y, x, self.gains[1], 1e-6)
        y = self.down(SiluAndMul.forward_native(self.gate_up(y)))
        return (y, residual, normed) if self.reads_twice else (y, residual)


def state_of(*layers: ss.SlideLinear, **options: Any) -> Any:
    """A model with these layers."""
    model = ModelState(Options(**options))
    for i, layer in enumerate(layers):
        model.add_layer(f"layers.{i}", layer)
    return model


def pass_of(*models: Any) -> Any:
    from slidesparse.integrations.vllm.graph_pass import GraphPass

    made = GraphPass()
    made.models = list(models)
    return made


def assert_near(got: Any, expected: Any) -> None:
    """The joined operators round as their definitions do, and the unjoined as vLLM's: some bf16 steps apart."""
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=3e-2)


def run_compiled(
    function: Callable[..., Any], rewrite: Callable[[fx.Graph], None], x: torch.Tensor, dynamic: bool | None = None
) -> Counter[str]:
    """Compile with a pass, compare with the eager result, and count our operators in the rewritten graphs."""
    import vllm.ir.ops  # noqa: F401

    found: Counter[str] = Counter()

    def rewritten(graph_module: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        rewrite(graph_module.graph)
        found.update(str(node.target) for node in graph_module.graph.nodes if "slidesparse" in str(node.target))
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    # What Inductor would be given, without its minutes of C++; one test below goes all the way.
    backend = aot_autograd(fw_compiler=rewritten, decompositions=select_decomp_table())
    with torch.no_grad():
        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(x, 0)  # as vLLM does
        compiled = torch.compile(function, dynamic=dynamic, fullgraph=True, backend=backend)
        assert_near(compiled(x), function(x))
    return Counter({name.split(".")[1]: number for name, number in found.items()})


# -- what is joined ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_twice", [False, True])
def test_norms_and_activations_are_joined_with_the_linear_after_them(reads_twice: bool) -> None:
    import vllm.ir.ops  # noqa: F401
    from torch._inductor import config as inductor

    block, found = Block(reads_twice).eval(), []
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    def rewrite(graph: fx.Graph) -> None:
        joins = join_norms(graph)
        found.append(dict(joins.joined) | {"in a chain": join_chains(graph)})

    with torch.no_grad(), inductor.patch(post_grad_custom_post_pass=rewrite):
        torch._dynamo.reset()
        compiled = torch.compile(block, dynamic=True, fullgraph=True)
        for rows in (9, 4):
            assert_near(compiled(x[:rows]), block(x[:rows]))
    expected = {"fused_add_rms_norm": 1, "silu_and_mul": 1, "in a chain": 4} | ({} if reads_twice else {"rms_norm": 1})
    assert found
    assert all(counts == expected for counts in found)


def test_a_plan_is_joined_whatever_its_patterns() -> None:
    block = Block(False, ("4:6", "dense", "dense", "2:4")).eval()
    model = state_of(block.qkv, block.o, block.gate_up, block.down)
    assert run_compiled(block, pass_of(model), torch.randn(9, 64).bfloat16()) == {"chain": 1}


def joined(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, **how: Any) -> int:
    """How many linears were joined."""
    found: list[Joins] = []
    run_compiled(function, lambda graph: found.append(join_norms(graph)), x, **how)
    return found[0].joined.total()


@pytest.mark.parametrize("adds", [False, True])
def test_the_norms_of_gemma_are_joined(adds: bool) -> None:
    """Their gain is 1 + weight, in float32."""
    import vllm.ir.ops  # noqa: F401
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    linear = sparse_linear(32, 64).eval()
    with set_current_vllm_config(VllmConfig()):
        norm = GemmaRMSNorm(64).bfloat16().requires_grad_(False)
    norm.weight.copy_(torch.rand(64, generator=torch.Generator().manual_seed(0)) / 100)  # nothing without the 1
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    def add_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = norm.forward_native(x, x.flip(0))
        return linear(normed), residual

    function = add_norm if adds else lambda x: linear(norm.forward_native(x))
    counts = run_compiled(function, pass_of(state_of(linear)), x)
    assert counts in ({"gemma_norm_linear": 1}, {"add_gemma_norm_linear": 1})  # vLLM adds by itself before 0.26


def test_what_computes_something_else_is_not_joined() -> None:
    import vllm.ir.ops  # noqa: F401
    from vllm.model_executor.layers.activation import SiluAndMul

    linear, gain = sparse_linear(32, 64).eval(), torch.rand(64)
    x, wide = torch.randn(4, 64).bfloat16(), torch.randn(4, 128).bfloat16()
    norm, silu, gelu = torch.ops.vllm_ir.rms_norm, SiluAndMul.forward_native, torch.nn.functional.gelu
    assert joined(lambda x: linear(norm(x, gain.bfloat16(), 1e-6)), x) == 1
    assert joined(lambda x: linear(silu(x)), wide) == 1
    gains = (lambda: gain, lambda: gain + 2.0, lambda: gain.half().float() + 1.0, lambda: gain - 1.0, lambda: None)
    for other in gains:  # in float32, where Gemma's is + 1.0
        assert joined(lambda x, other=other: linear(norm(x, other(), 1e-6)), x) == 0
    assert joined(lambda x: linear(norm(x, gain.bfloat16(), 1e-6, 32)), x) == 0  # over a part of each row
    assert joined(lambda x: linear(norm(x, gain.bfloat16(), 1e-6)), x[None]) == 0
    assert joined(lambda x: linear(silu(x)), wide[None]) == 0
    assert joined(lambda x: linear(silu(x)), wide, dynamic=True) == 0  # of unknown width
    assert joined(lambda x: linear(gelu(x[:, :64]) * x[:, 64:]), wide) == 0


# -- several models ------------------------------------------------------------------------------------------------


def layer_of(model: Any, gain: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A norm and the MLP of a loaded model."""
    mlp = model.model.layers[0].mlp
    return lambda x: mlp(torch.ops.vllm_ir.rms_norm(x, gain, 1e-6))


@pytest.mark.parametrize("draft_fuses", [True, False])
def test_two_models_of_a_process_are_joined_by_their_own_options(checkpoints: Any, draft_fuses: bool) -> None:
    from vllm.config import VllmConfig
    from vllm.config.utils import replace

    target = VllmConfig(model_config=configured(checkpoints("6:8")), additional_config=REFERENCE)
    options = {"slidesparse": {"backend": "reference", "fuse": draft_fuses}}
    other = configured(checkpoints("4:6"))
    draft = replace(target, model_config=other, quant_config=None, additional_config=options)
    assert draft.compilation_config is target.compilation_config  # as vLLM has it for draft models
    models = [loaded_by(target)]
    rewrite = target.compilation_config.inductor_compile_config[POST_PASS]
    alone = rewrite.uuid()
    models.append(loaded_by(draft, prefix="draft_model"))
    assert target.compilation_config.inductor_compile_config[POST_PASS] is rewrite
    assert rewrite.uuid() != alone
    assert deepcopy(rewrite) is rewrite  # vLLM copies its configuration, while layers still write to the states
    assert [state.options.fuse for state in rewrite.models] == [True, draft_fuses]
    gain, x = torch.rand(256).bfloat16(), torch.randn(5, 256).bfloat16()
    joined, left = {"rms_norm_linear": 1, "silu_mul_linear": 1}, {"linear": 2}
    assert run_compiled(layer_of(models[0], gain), rewrite, x) == joined
    assert run_compiled(layer_of(models[1], gain), rewrite, x) == (joined if draft_fuses else left)


def test_layers_of_no_model_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    block = Block(reads_twice=False).eval()
    counts = run_compiled(block, pass_of(state_of(block.qkv)), torch.randn(9, 64).bfloat16())
    assert counts == {"linear": 4}
    assert "its linears belong to no loaded model" in caplog.text


# -- the key of vLLM's cache ---------------------------------------------------------------------------------------


def test_the_compile_cache_key_holds_what_was_chosen() -> None:
    def key(text: str = "6:8 by hopper", pattern: str = "6:8", **options: Any) -> str:
        model = state_of(sparse_linear(8, 96, pattern), **options)
        model.status.outcomes["a"] = Outcome(True, True, text)
        return str(pass_of(model).uuid())

    assert key() == key()
    assert len({key(), key("4:6 by hopper"), key(fuse=False), key(pattern="4:6")}) == 4


def test_the_key_enters_vllms_own(vllm_config: Any) -> None:
    """By it vLLM finds compiled graphs, and from 0.33 on whole compiled models, for which no pass runs again."""
    from slidesparse.integrations.vllm.graph_pass import install_pass

    keys = [vllm_config.compute_hash()]
    for options in ({}, {"fuse": False}):
        install_pass(vllm_config.compilation_config, state_of(**options))
        keys.append(vllm_config.compute_hash())
    assert keys[-1] == vllm_config.compute_hash()
    assert len(set(keys)) == 3


def test_a_changed_byte_in_a_source_of_the_package_changes_the_compile_cache_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slidesparse.integrations.vllm import graph_pass

    folder = tmp_path / "package"
    shutil.copytree(graph_pass.PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    whole: Any = graph_pass.hash_sources
    monkeypatch.setattr(graph_pass, "hash_sources", functools.wraps(whole)(lambda: whole.__wrapped__(folder)))
    made = pass_of()
    before = made.uuid()
    names = ("counts.cu", "sparse_gemm.cuh", "graph_pass.py", "select.py")
    sources = [next(folder.rglob(name)) for name in names]
    for path in sources:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if content else b" ")
        assert made.uuid() != before, path
        path.write_bytes(content)
    assert made.uuid() == before
    sources[0].rename(sources[0].with_name("renamed.cu"))
    assert made.uuid() != before
