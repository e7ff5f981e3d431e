"""Products, layers and packing, each against what a user would run without sparsity."""
