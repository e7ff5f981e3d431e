"""vLLM's own Python, without its compiled parts and without a GPU.

``fetch_vllm.py`` puts it into an environment; ``.ci/run`` does so. vLLM must believe that it runs on a CPU before any
of its modules is imported, since many ask for the platform at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

MISSING = "vLLM's Python is not installed here: python tests/integrations/fetch_vllm.py does that, as CI does"


@pytest.fixture(autouse=True)
def default_type() -> Iterator[None]:
    """A model that vLLM fails to load leaves torch's default type behind."""
    import torch

    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def vllm_on_cpu() -> None:
    if find_spec("vllm") is None:
        pytest.skip(MISSING)
    import torch
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    if torch.cuda.is_available():
        pytest.skip("these tests make vLLM believe in a CPU; with a GPU tests/gpu/test_vllm.py runs the real engine")
    vllm.platforms._current_platform = CpuPlatform()
    from slidesparse.integrations.vllm import register

    register()


@pytest.fixture
def vllm_config(vllm_on_cpu: None) -> Iterator[Any]:
    """The configuration under which vLLM builds a model."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
