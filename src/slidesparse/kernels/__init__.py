"""Triton kernels: quantise and lift activations, pack weights on the device.

Nothing is imported here: calling a kernel needs Triton, and ``import slidesparse`` does not. Every kernel has a torch
twin that defines it (:mod:`slidesparse.quant`, :mod:`slidesparse.slide`) and is tested against it bit for bit.
"""
