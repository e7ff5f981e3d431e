"""Files on disk: bytes of tensors, staging, texts and models of a hub."""
