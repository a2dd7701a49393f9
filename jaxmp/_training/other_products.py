"""Tells who wraps an optimizer for 16 bits, and then computes its gradients in something else."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import is_narrow
from jaxmp._numerics.user_warnings import warn
from jaxmp._policies.policy import short_name
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import NORMS, all_policies
from jaxmp._program.compat import equations_behind
from jaxmp._program.flops import products_of
from jaxmp._program.op_classes import OPAQUE

# A walk through a program of many updates, none of which has a product in 16 bits, would be long.
_MOST_EQUATIONS = 20_000


def warn_of_other_products(grads: PyTree, rules: PolicyRules) -> None:
    """Warns if the products behind gradients read none of the dtypes that a policy computes in.

    Where an update is traced with its gradients, JAX knows what these were computed by. Gradients
    that come from elsewhere, such as an earlier program, say nothing.
    """
    policies = [policy for policy in all_policies(rules) if is_narrow(policy.compute_dtype)]
    if not policies:
        return
    # A part in float32 may be all that there is; norms have no products.
    parts = [policy for pattern, policy in rules.rules if policy and not _is_about_norms(pattern)]
    expected = {policy.compute_dtype for policy in (*policies, *parts)}
    found = set()
    for equation in itertools.islice(equations_behind(jax.tree.leaves(grads)), _MOST_EQUATIONS):
        if equation.primitive.name in OPAQUE and expected & _dtypes_read(equation):
            return
        for product in products_of(equation):
            dtypes = _dtypes_read(product)
            # An operand of 8 bits is one that somebody chose, and so is a precision of 16.
            chosen = "16" in str(product.params.get("precision"))
            floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
            low = bool(floats) and floats <= expected
            if chosen or low or any(dtype.itemsize == 1 for dtype in dtypes):
                return
            # With one operand of an expected dtype, it may be the gradient of a product of such
            # operands that returns float32, or a 16-bit param in float32. A scalar may be a norm.
            if not expected & floats and product.outvars[0].aval.shape:
                found |= floats
    if found:
        names = " and ".join(sorted({policy.compute_dtype.name for policy in policies}))
        read = " and ".join(sorted(dtype.name for dtype in found))
        warn(
            f"the optimizer was wrapped for {names}, and all products behind its gradients are "
            f"{read}: the loss runs under no policy, or under another one. Put it under "
            f"jaxmp.autocast(loss_fn, {short_name(policies[-1])!r}), or the model under "
            "apply_policy (make_train_step does it, without policy='none'); or wrap the optimizer "
            "for the dtype that is meant, such as 'float32'"
        )


def _is_about_norms(pattern: Any) -> bool:
    return pattern is NORMS or (isinstance(pattern, str) and NORMS(pattern.removeprefix("type:")))


def _dtypes_read(equation: Any) -> set[Any]:
    return {x.aval.dtype for x in equation.invars if hasattr(x.aval, "dtype")}
