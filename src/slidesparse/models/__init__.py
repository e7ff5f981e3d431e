"""Models in memory: which linears are treated, calibration layer by layer, training on with zeros held."""
