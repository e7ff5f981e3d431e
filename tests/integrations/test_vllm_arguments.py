"""vLLM's engine knows all arguments that ``bench serve`` gives it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from slidesparse_bench.engine.eagle_head import eagle_settings
from slidesparse_bench.serve.serve_options import ServeOptions, engine_settings

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


def test_vllms_engine_knows_the_arguments(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = {"quantization": "slidesparse", "compilation_config": {"max_cudagraph_capture_size": 2048}}
    settings |= {"tensor_parallel_size": 2, **eagle_settings("vllm", tmp_path, 2.5)[0]}
    options = ServeOptions(tmp_path, True, {"slidesparse": {"backend": "auto"}}, settings, share=0.9)
    assert engine_settings(options).keys() <= {field.name for field in fields(AsyncEngineArgs)}
