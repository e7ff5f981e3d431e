from __future__ import annotations

from pathlib import Path

import pytest
import torch
from no_gpu import too_old

import slidesparse
from slidesparse import InputError, UnsupportedError
from slidesparse.base.device import usable_device, why_no_cuda
from slidesparse.offline import info


def test_a_cpu_always_serves() -> None:
    assert usable_device("cpu") == torch.device("cpu")


def test_the_first_cpu_is_the_cpu() -> None:
    """Libraries that read files know no numbers of CPUs, and a file was said to be damaged."""
    assert usable_device("cpu:0") == usable_device(torch.device("cpu", 0)) == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "meta", "cpu:x", "cpu:1"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(InputError, match="unknown device; got '"):
        usable_device(device)


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first one, which is what safetensors reads onto where no number says otherwise."""
    monkeypatch.setattr("slidesparse.base.device.why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert usable_device("cuda") == torch.device("cuda:2")
    assert usable_device("cuda:1") == torch.device("cuda:1")


def test_too_old_a_driver_is_one_clear_line_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "init", too_old)
    words = "The NVIDIA driver on your system is too old (found version 11040)."
    assert words in (why_no_cuda() or "")
    for call in (lambda: usable_device("cuda:1"), lambda: slidesparse.load(tmp_path, device="cuda")):
        with pytest.raises(UnsupportedError) as error:
            call()
        assert words in str(error.value)
        assert "use the device cpu" in str(error.value)
    found = info.collect()
    assert found["gpus"] == []
    assert words in info.describe(found)
