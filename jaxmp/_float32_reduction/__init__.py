"""Gradients of params in float32, whatever dtype a loss function computes in.

- What flows: a `Value` (`values.py`): the array that the program computes, and the float32 source
  of its gradient; its `Origin` says whether it is a weight or an activation.
- `api.py` traces the loss and marks its params; `reductions.py` runs the jaxpr again. A rule for a
  primitive is an entry of `REDUCTIONS` there; a way to be a weight is in `weights.py`.
- Control flow and functions with derivatives of their own have files of these names.

Read README.md first: it has the origins, and the program that fails without each rule.
"""
