"""Policies, autocast and training for Flax modules, linen and nnx.

- What flows: rules -> a `Decision` for a module -> `ModulePolicy` -> `Casts` around its call, and a
  `Promise` of the dtypes that it returns. A layer with a `dtype` gets that attribute set.
- linen decides when a module is called: `linen_policy.py` makes the subclass,
  `linen_interceptor.py` runs the calls, `linen_layers.py` sets dtypes, `linen_record.py` reports
  what was reached. nnx decides once: `nnx_plans.py` plans, `nnx_policy.py`
  applies. Read `module_casts.py` first: both rest on it, and on `module_checks.py`.
- `nnx_autocast.py` and `nnx_training.py` are autocast and gradients of live modules; they name
  operations by `nnx_scopes.py`, as nnx has no name stack.
- A layer with products in float8 is a row of `_LINEN` or `_NNX` in
  `layer_products.py`.
"""

from jaxmp._modules.extras import require

require("flax", "jaxmp.linen and jaxmp.nnx need")
