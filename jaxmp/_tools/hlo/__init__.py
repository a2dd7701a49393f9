"""Reads the text of a compiled program (HLO), as JAX's compilers print it.

XLA's partitioner inserts the collectives after tracing: no jaxpr has them, only this text does.

- What flows: `Module` (the text) -> `Instruction` (a line) -> `HloValue` (a result) -> `Transfer`
  (what one collective carries). `collectives.read_program` returns all of it.
- Read `parser.py` first: lines, source frames, shapes. Then `dataflow.py`: where a value comes
  from, how often a loop runs. `replica_groups.py` and `slices.py` read which devices communicate;
  `products.py` finds products in float8.
- An opcode that only passes a value on is a row of `dataflow._PASSED_ON`; a kind of collective is
  one of `collectives.KINDS`; a syntax of device groups goes into `replica_groups.py`. Add the text
  of a compiler that shows it to `tests/hlo/programs`.
"""
