"""The Hopper backend: our own 2:4 GEMM for sm_90a, from the layout of a weight to the launch."""
