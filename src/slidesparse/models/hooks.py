"""Forward hooks: temporary ones, and those of a layer that another one replaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of a block, or when a later one cannot be registered."""
    with ExitStack() as registered:
        for handle in handles:
            registered.enter_context(handle)
        yield


def move_hooks(linear: nn.Linear, layer: nn.Module) -> None:
    """Move a linear's forward hooks to the layer in its place; their handles still remove them.

    Hooks that compute the weight before each call, as those of ``torch.nn.utils.prune``, end with the linear.
    """
    # The same dicts: a handle removes its hook from the dict in which it was registered.
    layer._forward_hooks = linear._forward_hooks
    layer._forward_hooks_with_kwargs = linear._forward_hooks_with_kwargs
    layer._forward_hooks_always_called = linear._forward_hooks_always_called
    if isinstance(linear.weight, nn.Parameter):  # else something computes it
        layer._forward_pre_hooks = linear._forward_pre_hooks
        layer._forward_pre_hooks_with_kwargs = linear._forward_pre_hooks_with_kwargs
