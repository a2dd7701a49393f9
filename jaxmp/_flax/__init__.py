"""Policies, autocast and training for Flax modules."""

from jaxmp._modules.extras import require

require("flax", "jaxmp.linen and jaxmp.nnx need")
