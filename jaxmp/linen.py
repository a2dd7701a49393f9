"""Policies on linen modules: one set of rules for a whole model, without touching its code."""

from jaxmp._flax.linen_policy import (
    apply_policy as apply_policy,
    remove_policy as remove_policy,
    summary as summary,
    with_policy as with_policy,
)
