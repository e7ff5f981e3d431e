"""Measuring this GPU: the timing protocol, and the layers of a model that is being loaded.

``slidesparse tune`` and the benchmarks, the vLLM plugin and ``slidesparse.load`` measure with the same stopwatch.
"""
