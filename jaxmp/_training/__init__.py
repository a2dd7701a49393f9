"""Gradients, the optimizer and the train step.

A `TrainState` (`train_state.py`) flows through a step. Read `train_step.py` first, which has the
whole of one: gradients under a loss scale (`gradients.py`, with `microbatch.py`), then one step of
the optimizer, taken or skipped (`optimizer_step.py`, with `skipping.py`). The loss scales and their
defaults are in `_numerics/loss_scale.py`.

The optimizer sees float32 alone: `masters.py` makes it of narrow params, `compact_state.py` of a
narrow state. A way to store masters is a row of `STORAGES` in `master_storages.py`; an option of
all functions with gradients is a field of `GradientOptions`; a metric of a step is in
`step_metrics.py`. `per_shard.py` sums gradients over parts of a batch in float32.
"""
