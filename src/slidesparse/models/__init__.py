"""Models in memory: which linears are treated, calibration layer by layer, what a pattern costs, plans."""
