"""Tells who wraps an optimizer for 16 bits, and then computes its gradients in something else."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._autocast.regions import DONE
from jaxmp._numerics.dtypes import is_narrow
from jaxmp._numerics.user_warnings import warn
from jaxmp._policies.policy import short_name
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import all_policies
from jaxmp._program.compat import equations_behind
from jaxmp._program.flops import products_of


def warn_of_other_products(grads: PyTree, rules: PolicyRules) -> None:
    """Warns if the products on the way to gradients read none of the dtypes of the policies.

    Where an update is traced with its gradients, JAX knows what these were computed by. Gradients
    that come from elsewhere, such as an earlier program, say nothing.

    Args:
      grads: the gradients of an update.
      rules: the rules that the optimizer was wrapped for.
    """
    narrow = [policy for policy in all_policies(rules) if is_narrow(policy.compute_dtype)]
    expected = {policy.compute_dtype for policy in narrow}
    found = set()
    if not expected:
        return
    for equation in equations_behind(jax.tree.leaves(grads)):
        # Rules of autocast may have a float32 part, which may be all that there is.
        is_decided = DONE in str(equation.source_info.name_stack)
        for product in products_of(equation):
            dtypes = [x.aval.dtype for x in product.invars[:2]]
            # It computes in the wider one. An operand of 8 bits is one that somebody chose.
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            if widest in expected or any(dtype.itemsize == 1 for dtype in dtypes):
                return
            if jnp.issubdtype(widest, jnp.floating) and (is_narrow(widest) or not is_decided):
                found.add(widest)
    if not found:
        return
    names = " and ".join(sorted(dtype.name for dtype in expected))
    read = " and ".join(sorted(dtype.name for dtype in found))
    warn(
        f"the optimizer was wrapped for {names}, and all products behind its gradients are "
        f"{read}: the loss runs under no policy, or under another one. Put it under "
        f"jaxmp.autocast(loss_fn, {short_name(narrow[-1])!r}), or the model under apply_policy "
        "(make_train_step does it, without policy='none'); or wrap the optimizer for the dtype "
        "that is meant, such as 'float32'"
    )
