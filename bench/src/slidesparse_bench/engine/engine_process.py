"""Run an engine in a process of its own, and call there what this process asks for."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from slidesparse.errors import UnsupportedError, first_line

STOP_S = 20.0
"""An engine has so long to end by itself."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # needs a compiler at run time; sampling is short, and the same for all
}


FarEnd: TypeAlias = Callable[[Connection, Any], None]
"""Runs in an engine's process, with that process's end of a pipe and the options."""


@dataclass(frozen=True)
class EngineOptions:
    """The options of one engine.

    Attributes:
        folder: Its checkpoint.
        plugin: Load slidesparse's plugin; without it the engine is a stock one.
        additional: The value of vLLM's ``--additional-config``.
        arguments: More arguments of the engine.
        share: Share of the GPU's memory that must be free when it starts.
    """

    folder: Path
    plugin: bool
    additional: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    share: float = 0.1


class Engine:
    """An engine in another process, as this process sees it: calls run there, one at a time.

    Args:
        options: The engine to start. The constructor returns at once; :meth:`ready` waits.
        far_end: The function that runs in the other process: :func:`answer_calls` with a driver.
    """

    def __init__(self, options: EngineOptions, far_end: FarEnd) -> None:
        context = get_context("spawn")
        self._near, far = context.Pipe()
        self._process = context.Process(target=far_end, args=(far, options))
        self._process.start()
        far.close()

    def ready(self, timeout_s: float = 600.0) -> None:
        """Wait until the engine can be used.

        Raises:
            UnsupportedError: The engine did not start.
        """
        self.answer(timeout_s)

    def ask(self, name: str, *arguments: Any) -> None:
        """Start a method of the driver in the other process; :meth:`answer` waits for it."""
        with suppress(OSError):  # that process has ended, as its answer will say
            self._near.send((name, arguments))

    def answer(self, timeout_s: float = 600.0) -> Any:
        """Wait for the method that was asked for last, and return its value.

        Raises:
            UnsupportedError: It failed, or took too long.
        """
        if not self._near.poll(timeout_s):
            raise UnsupportedError("the engine does not answer", got=f"nothing in {timeout_s:.0f} s")
        try:
            value, error = self._near.recv()
        except (EOFError, OSError):
            value, error = None, "its process ended; its output says why"
        if error is not None:
            raise UnsupportedError("the engine failed", got=error)
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        """Ask for a method of the driver, and return its value."""
        self.ask(name, *arguments)
        return self.answer()

    def stop(self) -> None:
        """Ask the engine's process to end, kill it after :data:`STOP_S`, and wait until it has ended."""
        with suppress(OSError):
            self._near.send(None)
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()  # until then it has its memory, and the next engine may find none


def answer_calls(
    connection: Connection, make: Callable[[], Any], tell: Callable[[Exception], str] = first_line
) -> None:
    """Make a driver, and call its methods as the other process asks, until it sends None.

    The first answer, without a value, says that the driver was made, or why it was not.

    Args:
        connection: The near end's pipe.
        make: Makes the driver.
        tell: Says what an error is, in one line.
    """
    driver: Any = None
    message: tuple[str, tuple[Any, ...]] | None = ("start", ())
    while message is not None:
        try:
            if driver is None:
                driver, value = make(), None
            else:
                value = getattr(driver, message[0])(*message[1])
            connection.send((value, None))
        except Exception as error:  # any error must reach the other process
            traceback.print_exc()
            connection.send((None, tell(error)))
            if driver is None:
                return
        message = connection.recv()
