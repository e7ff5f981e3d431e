"""Triton kernels: quantise and lift activations, pack weights on the device.

Nothing is imported here: Triton is needed by those who call a kernel, not by ``import slidesparse``. Every kernel has a
torch twin that defines it (:mod:`slidesparse.quant`, :mod:`slidesparse.slide`) and is tested against it bit for bit.
"""
