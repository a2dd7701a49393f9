"""What the adapters of linen, nnx and Equinox share: rules for modules, scopes and tables.

- What flows: rules -> a `Decision` for each module (`decisions.decide`) -> the library's own way to
  follow it. Flax layers have a `dtype`, which `jaxmp._flax` sets. Equinox layers have none: they
  run in scopes that name their path and policy, which autocast reads.
- Read `decisions.py` first. `marks.py` makes the classes of modules under policies, and nothing
  else makes classes; `scopes.py` opens the scopes, `summary.py` prints the dtypes of a
  model, `extras.py` says how to install a library.
- A family of layers that stays out of float8 is a row in `jaxmp._policies.presets`; a column of the
  table is a field of `summary.Row`.
"""
