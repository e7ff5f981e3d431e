"""The Hopper backend: our own 2:4 GEMM for sm_90a, with weight layout, tiles, compilation and launch."""
