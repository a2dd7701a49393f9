"""Numbers and trees of arrays: dtypes, rounding, 8-bit codes, loss scales.

The lowest folder: it imports nothing else of jaxmp. Arrays and pytrees of arrays flow through it.

- `dtypes`: names of dtypes and predicates on them; read it first. A new dtype is a row of `_NAMES`.
- `tree`: casts, finiteness, selection and path names of pytrees.
- `rounding`, `stochastic`, `split`: float32 to fewer bits: nearest, at random, without loss.
- `float8_codes`, `block_codes`: codes of 8 bits with scales: for products, for optimizer states.
- `loss_scale`: the configs of loss scales. A new rule is a class with the methods of `LossScale`.
- `precision`: the names of precisions of float32 products. A new algorithm is a row of its table.
- `histograms`: magnitudes counted by power of two. `user_warnings`: warnings at the user's line.
"""
