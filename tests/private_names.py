"""Remove one private name of torch, import slidesparse, and run a layer on the CPU; run as a script by a test.

Each name has a process of its own, forked from one that has imported torch but none of slidesparse, so that a name
costs a fraction of a second. It prints a JSON object: name -> what came of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pkgutil
import sys
from typing import Any

import torch
import torch._dynamo

TORCH_NEEDS_IT = {
    # Dynamo calls these itself.
    *("torch._dynamo.config", "torch._guards.tracing", "torch._subclasses.fake_tensor.unset_fake_temporarily"),
    *("torch._subclasses.fake_tensor.FakeTensorMode", "torch.Tensor._make_wrapper_subclass"),
    # These take seconds to import, which the door alone does.
    *("torch._inductor.pattern_matcher.fwd_only", "torch._inductor.pattern_matcher.fx_to_pattern"),
}
"""Names that are hidden where our door looks them up, since torch cannot run without them."""

COMPILED = {"torch.no_such_name"}
"""Names without which the layer is compiled too, for half a second each."""


def remove(name: str) -> None:
    """Take a name away from torch, or only from our door."""
    resolve = pkgutil.resolve_name
    if name not in TORCH_NEEDS_IT:
        owner, _, attribute = name.rpartition(".")
        held = resolve(owner)
        if hasattr(held, attribute):  # a build without CUDA lacks some
            delattr(held, attribute)

    def without(asked: str) -> Any:
        if asked == name:
            raise AttributeError(name)
        return resolve(asked)

    pkgutil.resolve_name = without


def run(compiles: bool) -> dict[str, Any]:
    """Import the package and run one INT8 layer in each way: what it gave, and what the log said."""
    torch.set_num_threads(1)
    said = io.StringIO()
    logging.getLogger("slidesparse").addHandler(logging.StreamHandler(said))
    import slidesparse as ss
    from slidesparse.base import torch_private

    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48)
    linear.weight.data *= ss.prune_mask(linear.weight.detach(), "6:8")
    layer = ss.SlideLinear.from_linear(linear, "6:8", "int8")
    x = torch.randn(5, 64)
    y = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)
    if compiles:
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), y)
    wanting = layer(x.clone().requires_grad_())
    assert torch.equal(wanting, y)
    try:
        wanting.sum().backward()
    except ss.UnsupportedError as error:
        refused = str(error)
    assert "inference" in refused

    int8 = [torch.randint(-128, 128, size, dtype=torch.int8) for size in ((32, 64), (64, 16))]
    assert torch.equal(torch_private.int8_mm(*int8), (int8[0].long() @ int8[1].long()).int())
    answers = classmethod(lambda cls, func, *_: torch.ones(1))
    kind = type("Kind", (torch.Tensor,), {"__torch_function__": answers, "__torch_dispatch__": answers})
    made = torch_private.stand_in(kind, (2, 3), dtype=torch.bfloat16, device=torch.device("cpu"))
    with torch._C.DisableTorchFunctionSubclass():
        assert (type(made), made.shape, made.dtype, made.stride()) == (kind, (2, 3), torch.bfloat16, (3, 1))
        assert torch.equal(made * 2, torch.ones(1))
    return {"y": hashlib.sha256(y.numpy().tobytes()).hexdigest(), "said": said.getvalue()}


def answer(name: str) -> str:
    """What comes of it, as JSON."""
    try:
        remove(name)
        return json.dumps(run(name in COMPILED))
    except BaseException as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def in_a_process(name: str) -> dict[str, Any]:
    """The same, without a trace in this process."""
    reads, writes = os.pipe()
    if not os.fork():
        os.write(writes, answer(name).encode())
        os._exit(0)
    os.close(writes)
    with open(reads, encoding="utf-8") as pipe:
        given: dict[str, Any] = json.load(pipe)
    os.wait()
    return given


if __name__ == "__main__":
    print(json.dumps({name: in_a_process(name) for name in sys.argv[1:]}))
