from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from thinning import mark_slow_cases

# Without a GPU the kernels run in Triton's interpreter, which must be asked for before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Deadlines time the machine, not the code; a derandomised run fails for everybody or for nobody.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("suite")


# A shell ignores these signals in what it starts in the background, and what a process starts inherits that. Tests of
# interruptions need them.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_configure(config: pytest.Config) -> None:
    """One thread a worker: OpenMP's threads of several workers would wait for each other's in loops that do nothing.

    Set where the workers start from, and inherited by them and by what tests start.
    """
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Unless ``-n`` is given: one process for tests that share a GPU, and for named files, which need no workers."""
    if any(argument.startswith("-n") for argument in config.invocation_params.args):
        return None
    on_a_gpu = "gpu" in config.option.markexpr.replace("not gpu", "")
    return 0 if on_a_gpu or config.args_source is config.ArgsSource.ARGS else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


LEFT = pytest.StashKey[int]()
"""Cases that this run leaves to ``-m slow``."""


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what ``-m`` left out because it is slow; ``-k`` leaves out whatever it does not name."""
    config = items[0].config
    if not config.option.keyword:
        slow = [one for one in items if one.get_closest_marker("slow") and not one.get_closest_marker("gpu")]
        config.stash[LEFT] = len(slow)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this worker."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = session.config.stash.get(LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker counted: each of them collects all."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, 0):
        terminalreporter.write_line(f"{left} cases are left to pytest -m slow (tests/thinning.py chooses most of them)")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where there is one."""
    mark_slow_cases(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
