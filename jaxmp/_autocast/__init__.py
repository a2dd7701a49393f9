"""Mixed precision for any function: its jaxpr is planned, and then run again.

- What flows: a `Program` -> a `State` for each value (weak, low, high or firm, `strengths.py`) ->
  an `OpPlan` for each operation, with the dtypes of its operands (`op_plans.py`) -> a `Plan`.
- The class of an operation is in `_program/op_classes.py`: a mean is a `reduce_sum`, of the class
  `SUM`, and a division. The rule of a class is an entry of `PLANNERS` in `planners.py`.
- Loops, branches, calls and functions with derivatives of their own: `control_flow.py`.
- `kernels.py` takes kernels from a second trace; `coverage.py` warns of products that stay float32.

Read README.md first, then `strengths.py`: it says where each part of the rule is decided, and which
program fails without it.
"""
