"""Every kernel compiles for every architecture, without a GPU, and as it is meant to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_kernels_compile_without_spills_and_with_wide_accesses(arch: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run(
        [sys.executable, str(script), str(arch)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    variants = json.loads(run.stdout)
    assert variants
    for label, built in variants.items():
        # ptxas gives up to eight words for one more block on a multiprocessor; more is a tile that does not fit.
        assert built["stack"] <= 32, f"{label} spills: {built}"
        assert built["local"] == 0, f"{label} uses local memory: {built}"
        if label.startswith("pack"):
            continue
        # Inputs and lifted columns move 16 bytes at a time. What may be narrower: the scale, and with a partial pattern
        # the number of a group, its pairs of columns (4 bytes), and half a vector of an odd N's dense segment.
        narrow_loads, narrow_stores = ({"b32"}, {"b32", "v2.b32"}) if "@" in label else (set(), {"b32"})
        assert set(built["ld"]) - narrow_loads <= {"v4.b32", "v2.b64"}, f"{label}: {built['ld']}"
        assert set(built["st"]) - narrow_stores <= {"v4.b32", "v2.b64"}, f"{label}: {built['st']}"
