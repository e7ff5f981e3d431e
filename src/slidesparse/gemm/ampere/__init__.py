"""The backend for cards with ``mma.sync``: Ampere, Ada and later."""
