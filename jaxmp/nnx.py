"""Policies, autocast, gradients and an optimizer for nnx modules."""

from jaxmp._flax.nnx_autocast import autocast as autocast
from jaxmp._flax.nnx_policy import (
    apply_policy as apply_policy,
    remove_policy as remove_policy,
    summary as summary,
)
from jaxmp._flax.nnx_scopes import with_scopes as with_scopes
from jaxmp._flax.nnx_training import (
    Optimizer as Optimizer,
    grad as grad,
    value_and_grad as value_and_grad,
)
