"""Plugins for servers: no mathematics, and nothing of a server's is imported until it asks.

A plugin subclasses its server's configuration of compressed-tensors, and wraps the scheme of every linear that the
marker names. Files here are what plugins share; a plugin adds its server's classes and nothing else.

A loaded shard goes to :func:`slidesparse.layer.settle.settle`, which says what becomes of it.
"""

NAME = "slidesparse"
"""The name of the quantisation method, and of the key that holds a user's options."""

SPARSE_TENSOR_CORES = 80
"""Compute capability, times ten, of the first GPUs with Sparse Tensor Cores: Ampere."""
