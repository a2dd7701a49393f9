"""Policies, autocast, gradients, an optimizer and a train step for nnx modules."""

from jaxmp._flax.nnx_autocast import autocast as autocast
from jaxmp._flax.nnx_policy import (
    apply_policy as apply_policy,
    remove_policy as remove_policy,
    summary as summary,
)
from jaxmp._flax.nnx_scopes import with_scopes as with_scopes
from jaxmp._flax.nnx_train_step import make_train_step as make_train_step
from jaxmp._flax.nnx_training import (
    Optimizer as Optimizer,
    grad as grad,
    value_and_grad as value_and_grad,
)
