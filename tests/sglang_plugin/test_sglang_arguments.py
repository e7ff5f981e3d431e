"""SGLang's engine knows all arguments that ``bench serve`` gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slidesparse_bench.engine.eagle_head import eagle_settings
from slidesparse_bench.serve.serve_options import ServeOptions, engine_settings

pytestmark = pytest.mark.usefixtures("sglang_on_cpu")


def test_sglangs_engine_knows_the_arguments(tmp_path: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    more, _ = eagle_settings("sglang", tmp_path, 2.5)
    options = ServeOptions(tmp_path, True, {"slidesparse": {"backend": "auto"}}, more | {"tp_size": 2}, server="sglang")
    assert engine_settings(options).keys() <= ServerArgs.__annotations__.keys()
