"""Checkpoints: what their tensors and configurations mean, and models loaded from them."""
