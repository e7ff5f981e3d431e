"""Programs from CUDA C++, by NVRTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ptx_emulator.program import Program, read_program


def compile_program(files: Mapping[str, str], options: Sequence[str]) -> Program:
    """Return the only kernel of a source.

    Args:
        files: Name in ``#include`` -> text: first the one to compile, then headers.
        options: For NVRTC, with a virtual architecture.
    """
    from cuda.bindings import nvrtc

    (name, source), *headers = [(name.encode(), text.encode()) for name, text in files.items()]
    includes, contents = [name for name, _ in headers], [text for _, text in headers]
    _, made = nvrtc.nvrtcCreateProgram(source, name, len(headers), contents, includes)
    (status,) = nvrtc.nvrtcCompileProgram(made, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(made)
    log = bytes(size)
    nvrtc.nvrtcGetProgramLog(made, log)
    assert int(status) == 0, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(made)
    text = bytes(size)
    nvrtc.nvrtcGetPTX(made, text)
    nvrtc.nvrtcDestroyProgram(made)
    return read_program(text.decode())
