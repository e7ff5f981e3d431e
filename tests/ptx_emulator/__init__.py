"""An emulator of the PTX that NVRTC writes of the Hopper kernel; ``machine`` says what it models."""
