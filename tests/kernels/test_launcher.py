"""What a launcher spares a kernel while Triton compiles it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from triton import knobs

from slidesparse.kernels.triton_launcher import Launcher


class Kernel:
    """In the place of a ``triton.jit`` function."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: object, **options: object) -> None:
            self.hooks += [knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook]
            if self.fails:
                raise RuntimeError("out of registers")

        return launch


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_listens_while_it_compiles_and_everybody_does_afterwards(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    listeners = [lambda **_: None, lambda **_: None]
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", listeners[0])
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", listeners[1])
    kernel = Kernel(fails)
    try:
        Launcher(kernel, ()).compile_and_launch(1, (), aligned=True)
    except RuntimeError:
        assert fails
    assert kernel.hooks == [None, None]
    assert [knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook] == listeners


class Compiled:
    """In the place of Triton's ``CompiledKernel``, which from 3.8 on unloads its code when it dies."""

    function, packed_metadata = 7, (4, 1, 0)
    run = staticmethod(lambda *_: None)  # Triton's is another object too, which does not keep this one alive


def test_the_compiled_kernel_lives_as_long_as_its_launcher() -> None:
    made: list[weakref.ref[Compiled]] = []

    class Compiling(Kernel):
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*arguments: object, **options: object) -> Compiled:
                compiled = Compiled()
                made.append(weakref.ref(compiled))
                return compiled

            return launch

    launcher = Launcher(Compiling(), ())
    launcher.compile_and_launch(1, (), aligned=True)
    gc.collect()
    assert launcher.ready
    assert made[0]() is not None
    del launcher
    gc.collect()
    assert made[0]() is None
