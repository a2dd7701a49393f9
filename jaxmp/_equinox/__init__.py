"""Policies and gradients for Equinox modules."""

from jaxmp._modules.extras import require

require("equinox", "jaxmp.equinox needs")
