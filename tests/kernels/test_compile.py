"""Every kernel compiles for every architecture, without a GPU, and as it is meant to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
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
        assert built["stack"] == 0, f"{label} spills: {built}"
        assert built["local"] == 0, f"{label} uses local memory: {built}"
        if label.startswith("pack"):
            continue
        # The passes that read take 16 bytes at a time, the one that writes takes pairs of columns and stores 16 bytes.
        # Other accesses of 4 bytes: the scale.
        pair = "v2.b32" if " fp32->" in label else "b32"
        assert set(built["ld"]) <= {"v4.b32", pair}, f"{label}: {built['ld']}"
        assert set(built["st"]) <= {"v4.b32", "b32"}, f"{label}: {built['st']}"
        assert built["st"].get("b32", 0) <= 1, f"{label}: {built['st']}"
        # SGLang's quantiser divides so, and gives other bits than a division that is rounded.
        assert built["approximate_divisions"] == (2 if "sglang" in label else 0), f"{label}: divisions"
        # Reductions have some; a gather through shuffles, which the compiler makes for a single warp, has hundreds.
        assert built["shuffles"] <= 32, f"{label}: {built['shuffles']} shuffles"
        if "shared_stores" not in built:
            continue
        # A gather fills shared memory with what a lane holds side by side: pair by pair takes four times as long.
        assert set(built["shared_stores"]) <= {"32", "64"}, f"{label}: {built['shared_stores']}"
        if label.startswith("6:8 18944 "):  # 15 to 18 instructions a column; 20.5 were slow
            assert built["instructions"] * 512 / 18944 < 19, f"{label}: {built['instructions']}"
    assert sum("shared_stores" in built for built in variants.values()) == 2
