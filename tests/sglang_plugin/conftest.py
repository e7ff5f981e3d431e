"""SGLang's own Python, without its compiled parts and without a GPU; ``try_sglang.py`` puts it into an environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MISSING = "SGLang's Python is not installed here: python tests/sglang_plugin/try_sglang.py does that, as CI does"


class StandIn(MetaPathFinder, Loader):
    """Gives a module of empty classes for torchvision, which has no build for this torch on every machine."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


@pytest.fixture(scope="session")
def sglang_on_cpu() -> None:
    if find_spec("sglang") is None:
        if os.environ.get("SGLANG_MUST_BE_THERE"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    import transformers.image_utils  # noqa: F401 # before the stand-in, or it would believe in torchvision

    sys.meta_path.insert(0, StandIn())
    import sglang  # noqa: F401 # up to 0.5.20 it imports transformers anew

    # Without torchvision transformers 5.12 has none, and SGLang registers processors of images with it.
    sys.modules["transformers"].AutoImageProcessor = type(  # type: ignore[attr-defined]
        "AutoImageProcessor", (), {"register": lambda *given, **more: None}
    )


@pytest.fixture
def server(sglang_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments of a server, and a GPU of compute capability 9.0 as far as SGLang asks."""
    from sglang.srt import runtime_context

    arguments = SimpleNamespace(
        enable_lora=None, lora_paths=None, cpu_offload_gb=0, offload_group_size=-1, chunked_prefill_size=8192
    )
    monkeypatch.setattr(runtime_context._CONTEXT, "_server_args", arguments)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    from slidesparse.integrations.sglang import register

    register()
    return arguments
