"""Measurement of layers on this GPU: the timing protocol, and the layers of a model at load.

The benchmarks, the servers' plugins and ``slidesparse.load`` use the same stopwatch.
"""
