"""Delayed scaling of float8 products: the magnitudes of earlier steps give the scales of this one.

No product waits for a maximum then. The folder is on a shelf of its own: only `jaxmp.float8`
imports it, and who scales by current magnitudes runs none of it.

- What flows: `Places` (where a program rounds) -> `PlaceValues` (the magnitude to expect at each,
  and a probe) -> the magnitudes of this step -> `Float8State`, an ordinary input and output.
- Read `state.py` first: the functions of a training loop. `places.py` numbers the places of a
  program, and runs it again with their scales.
- An equation that can round by a known scale is a branch of `_ScaledRun.operation`; an operation to
  enter is one of `jaxmp._program.control_flow.bodies_to_extend`.
"""
