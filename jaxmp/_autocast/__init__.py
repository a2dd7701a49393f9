"""Mixed precision for any function: its jaxpr is planned, and then run again.

- What flows: a `Program` -> a `State` for each value (weak, low, high or firm, `kinds.py`) -> a
  `Step` for each operation, with the dtypes of its operands (`steps.py`) -> a `Plan` that runs.
- The class of an operation is in `_program/op_classes.py`: a mean is a `reduce_sum`, of the class
  `SUM`, and a division. The rule of a class is an entry of `RULES` in `rules.py`.
- Loops, branches, calls and functions with derivatives of their own: `control_flow.py`.
- `kernels.py` takes kernels from a second trace; `coverage.py` warns of products that stay float32.

Read README.md first, then `kinds.py`: it says where each part of the rule is decided, and which
program fails without it.
"""
