"""Compute ahead of a consumer, in threads, so that computing, reading and writing go on at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Generator[Result, None, None]:
    """Yield the results of ``work`` in the order of its items, and keep some threads busy with the next ones.

    Inside a thread torch computes with that thread alone: threads of torch that wait for each other lose more than they
    gain when others use the processor too. At most ``threads`` results wait.

    Args:
        work: Called in threads of its own.
        items: Its arguments; taken one by one.
        threads: How many items are worked on at a time.
    """
    before = torch.get_num_threads()
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, "ahead", torch.set_num_threads, (1,))
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # the threads have changed it for MKL, which has one number for all
