"""Plugins for servers: no mathematics, and no import of a server before it calls.

A plugin subclasses its server's configuration of compressed-tensors, and wraps the scheme of every linear that the
marker names. Files here are shared by plugins; a plugin adds only its server's classes.

:func:`slidesparse.layer.settle.settle` decides on each loaded shard.
"""

NAME = "slidesparse"
"""The name of the quantisation method, and of the key of a user's options."""

SPARSE_TENSOR_CORES = 80
"""Compute capability, times ten, of the first GPUs with Sparse Tensor Cores: Ampere."""
