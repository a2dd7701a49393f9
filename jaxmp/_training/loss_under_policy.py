"""A loss under the policy of a train step: cast, put under rules, or left to its model."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._autocast.api import autocast
from jaxmp._numerics.dtypes import is_floating
from jaxmp._numerics.tree import cast_floating
from jaxmp._policies.patterns import is_about_paths
from jaxmp._policies.policy import Policy, get_policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import all_policies, get_rules
from jaxmp._recompute.api import Recompute, apply_recompute
from jaxmp._training.optimizer import MixedPrecision

Cast = Literal["products", "params", "all"]
# Returns a loss of modules that runs them in scopes, by which autocast knows what rules decide.
LossUnderRules = Callable[[PolicyRules], Callable[..., Any]]


def lowered_loss(
    loss_fn: Callable[..., Any],
    rules: PolicyRules | None,
    cast: Cast,
    recompute: Recompute,
    under_rules: LossUnderRules | None = None,
) -> Callable[..., Any]:
    """Returns the loss function as a step runs it: under rules, or as it is for None."""
    if rules is None:
        return apply_recompute(loss_fn, recompute)
    policy: Policy | PolicyRules = rules if rules.rules else rules.default or get_policy("float32")
    computed_in = {policy.compute_dtype for policy in all_policies(rules)}
    for compute in computed_in:
        if compute.itemsize == 1:
            raise ValueError(
                f"make_train_step cannot compute in {compute}: a plain cast to float8 loses small "
                "gradients. Use 'mixed_float8', which scales"
            )
    if under_rules is not None:
        loss_fn = under_rules(rules)
        policy = PolicyRules(default=rules.default) if rules.rules else policy
    elif any(not is_about_paths(pattern) for pattern, _ in rules.rules):
        raise ValueError(
            "the optimizer was wrapped for rules about types of modules (as 'O2' has them), which "
            "a function has not. Put the model under them with jaxmp.linen.apply_policy or "
            "jaxmp.nnx.apply_policy, and give make_train_step policy='none': the model casts by "
            "itself"
        )

    # As under `jit`, a loss may change dictionaries: `labels = batch.pop("labels")`.
    @functools.wraps(loss_fn, updated=())
    def of_copies(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(lambda x: x, (args, kwargs))
        return loss_fn(*args, **kwargs)

    # In a float32 loss, only the precision of its products is set.
    rewritten = autocast(of_copies, policy, recompute=recompute)
    # `cast="all"` rounds labels, too: near 1000, bfloat16 has steps of 4.
    if cast != "products":
        return _with_casts(apply_recompute(loss_fn, recompute), rewritten, policy, cast)
    # Float64 only where nothing computes in less.
    least = min(computed_in, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32))
    widest = max(jnp.dtype(jnp.float32), least, key=lambda dtype: dtype.itemsize)

    # Autocast makes float32 products narrow, but does not make narrow ones wider.
    def widen_narrow(x: Any) -> Any:
        narrow = is_floating(x) and x.dtype.itemsize < widest.itemsize
        return cast_floating(x, widest) if narrow and x.dtype not in computed_in else x

    def products_cast(params: PyTree, batch: PyTree, **collections: PyTree) -> Any:
        params, batch = jax.tree.map(widen_narrow, (params, batch))
        return rewritten(params, batch, **collections)

    return products_cast


def _with_casts(
    loss_fn: Callable[..., Any],
    rewritten: Callable[..., Any],
    policy: Policy | PolicyRules,
    cast: Cast,
) -> Callable[..., Any]:
    if isinstance(policy, PolicyRules):
        raise ValueError(
            f"cast={cast!r} casts to one dtype, and the optimizer was wrapped for rules, which "
            "have several. Use cast='products'"
        )
    if policy.products is not None:
        raise ValueError(
            f"cast={cast!r} casts to {policy.compute_dtype}, and this policy has products in "
            "float8, which only cast='products' makes"
        )
    compute = policy.compute_dtype
    fun = rewritten if compute.itemsize >= 4 else loss_fn

    def cast_first(params: PyTree, batch: PyTree, **collections: PyTree) -> Any:
        batch = cast_floating(batch, compute) if cast == "all" else batch
        return fun(cast_floating(params, compute), batch, **collections)

    return cast_first


def rules_of_step(policy: Any, tx: MixedPrecision) -> PolicyRules | None:
    """Returns the rules under which a loss runs; None if the model casts by itself."""
    if model_casts(policy):
        return None
    if policy is None:
        return tx.rules
    own_rules = get_rules(policy)
    if (own_rules.rules or tx.rules.rules) and own_rules != tx.rules:
        raise ValueError(
            "the optimizer was wrapped for other rules than those of this step, and its loss scale "
            "chosen for them. Leave the policy of make_train_step out: it is that of the optimizer"
        )
    # These dtypes decide the loss scale and the sums of gradients, which the optimizer has chosen.
    step, wrapped = own_rules.default or get_policy("float32"), tx.policy
    for what, here, there in (
        ("computes", step.compute_dtype, wrapped.compute_dtype),
        ("reduces gradients", step.reduce_dtype, wrapped.reduce_dtype),
    ):
        if here != there:
            raise ValueError(
                f"the train step {what} in {here}, but the optimizer was wrapped for {there}, and "
                "its loss scale chosen for that. Leave the policy of make_train_step out: it is "
                "that of the optimizer"
            )
    return own_rules


def model_casts(policy: Any) -> bool:
    return isinstance(policy, str) and policy.strip().lower() == "none"
