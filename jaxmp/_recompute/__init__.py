"""`recompute`: computes cheap values again in the backward pass.

A derivative needs values of the forward pass. Products are dear, so their results are stored; a
softmax or a gelu is cheap, and is computed again from stored values.

A `Program` (`_program/program.py`) flows through: `storage.py` decides which of its values are
stored; `pieces.py` divides the operations between them into pieces; `run.py` runs each piece in a
`jax.checkpoint`. With `codes=` the checkpoint is at the codes of stored values (`codes.py`), and
with a number for a mode some products count as cheap (`budget.py`). Lookups of labels become
comparisons (`lookups.py`), and masks that no turn of a loop changes stay in it (`invariants.py`).

Read `storage.py` first. A primitive that is not cheap is listed in `_COSTS` of
`_program/op_classes.py`. docs/recompute.md is for users.
"""
