"""An emulator of the PTX that NVRTC writes of the package's kernels; ``machine`` says what it models."""
