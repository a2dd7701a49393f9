"""Numbers and trees of arrays: dtypes, rounding, 8-bit codes, loss scales."""
