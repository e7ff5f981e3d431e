"""Measurement of layers on this GPU: the timing protocol, and the layers of a model at load.

``slidesparse tune`` and the benchmarks, the vLLM plugin and ``slidesparse.load`` use the same stopwatch.
"""
