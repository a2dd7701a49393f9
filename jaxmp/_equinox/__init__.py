"""Policies and gradients for Equinox modules.

Equinox's layers have no `dtype`, so that autocast does what the layers of Flax do themselves.

- What flows: rules -> a `Ruling` for each module -> a `_Mark` on an instance of a subclass, whose
  `__call__` opens scopes -> autocast, which reads the policy from the scopes.
- Read `module_policy.py` first. `module_tree.py` finds the modules of a model and rebuilds it;
  `filtered_gradients.py` puts autocast around a whole loss.
- Rules and scopes come from `jaxmp._modules`; a change of what a policy does is one of autocast.
"""

from jaxmp._modules.extras import require

require("equinox", "jaxmp.equinox needs")
