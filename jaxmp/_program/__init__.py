"""Reads programs (jaxprs), follows facts through them, and runs them again in other ways.

A `Program` flows through: operations `Op` over numbered values. Read `program`, then `evaluate`.

- `program`: the form. `read` makes a `Program` of a jaxpr.
- `wiring`: which operand of a loop, a branch or a call is which argument of the programs inside.
- `evaluate`: the evaluator. It runs a program on cells, as an `Interpreter` says.
- `control_flow`, `derivatives`: run an operation with programs inside again.
- `facts`: facts about values go through a program without running it, forward and backward.
- `op_classes`: the table of operations. A new primitive of JAX is entered in `_TABLE`
  (an elementwise one that makes no error much larger: `PROMOTE`), in `_COSTS`
  if it is not cheap, and in the sets below that describe it (`LINEAR`, `REDUCTIONS`).
- `compat`, `hi_primitives`: the differences between versions of JAX.
- `tracing`: traces a call; `explicit_axes`, `mesh_axes`: on meshes with explicit axes.
- `hoist`, `flops`, `scopes`, `cpu_compiler`: one question each.

docs/transformations.md writes a transformation from scratch.
"""
