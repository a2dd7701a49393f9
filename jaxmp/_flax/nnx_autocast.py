"""`autocast` for functions of live nnx modules."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp  # noqa: F401 (for the doctest)
import jmp
from flax import nnx

from jaxmp._autocast.api import Kernels, Output, autocast as autocast_function
from jaxmp._autocast.decorator import policy_may_come_first
from jaxmp._flax.nnx_modules import call_pure, pure
from jaxmp._flax.nnx_scopes import open_scopes, warn_unused_rules
from jaxmp._policies.policy import get_policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._recompute.api import Recompute

_TAG = "jaxmp.autocast"


@policy_may_come_first
def autocast(
    fun: Callable[..., Any] | str | jmp.Policy | PolicyRules,
    policy: str | jmp.Policy | PolicyRules | None = None,
    *,
    lower: Iterable[str] = (),
    float32: Iterable[str] = (),
    promote: Iterable[str] = (),
    output: Output = "traced",
    enter_custom_vjp: bool = False,
    kernels: Kernels = "low",
    recompute: Recompute = "never",
) -> Callable[..., Any]:
    """Rewrites a function of live modules like `jaxmp.autocast`, and keeps its changes to modules.

    Batch statistics, RNG counters and new variables are written back into the modules that were
    passed in. Rules match modules as in `jaxmp.nnx.apply_policy`: by path, type or predicate, each
    module on its own. Operations outside of modules follow the default policy.

    Args:
      fun: a function of modules and arrays, a module, or a method of one. It may only change
        modules that are among its arguments. Or the policy alone, for a decorator.
      policy: a policy or its name, or rules over the modules among the arguments.
      lower: primitives or jitted functions to run in the compute dtype.
      float32: primitives or jitted functions to run in float32.
      promote: primitives or jitted functions that follow the dtypes of their operands.
      output: the dtype of the results: `"traced"`, `"policy"` or `"computed"`.
      enter_custom_vjp: whether to rewrite functions with a `jax.custom_vjp` too.
      kernels: the precision of kernels: `"low"` or `"traced"`. An `nnx.Param` is a param.
      recompute: what to compute again for the backward pass, as for `jaxmp.recompute`.

    Returns:
      A function with the arguments of `fun`.

    Raises:
      ValueError, TypeError: as `jaxmp.autocast` does.

    >>> model = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    >>> _ = autocast(model, "mixed_bfloat16")(jnp.full((4, 2), 3.0))
    >>> model.mean.get_value()
    Array([1.5, 1.5], dtype=float32)
    """
    rules: PolicyRules | None = None
    if isinstance(policy, PolicyRules):
        # The patterns match modules, and the scopes of the modules tell autocast the decisions.
        rules, policy = policy, PolicyRules(default=policy.default)
    elif get_policy(policy).products is not None:
        rules = PolicyRules(default=policy)  # heads are left out of float8 by their names
    owner, function = _owner_and_function(fun)

    def call(args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def scopes(nodes: Any) -> Any:
        if rules is None:
            return contextlib.nullcontext()
        warn_unused_rules(nodes, rules)
        return open_scopes(nodes, rules)

    pure_fun = pure(call, _TAG, scopes)
    # Audits show the name of the function. A functools.partial has none.
    if hasattr(function, "__name__"):
        pure_fun = functools.wraps(function, updated=())(pure_fun)
    rewritten = autocast_function(
        pure_fun,
        policy,
        lower=lower,
        float32=float32,
        promote=promote,
        output=output,
        enter_custom_vjp=enter_custom_vjp,
        kernels=kernels,
        recompute=recompute,
    )

    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        args = args if owner is None else (owner, *args)
        return call_pure(rewritten, _TAG, (args, kwargs))

    return functools.wraps(function, updated=())(autocast_fun)


def _owner_and_function(fun: Any) -> tuple[Any, Callable[..., Any]]:
    """Splits a module or a method into the module and a function that takes it as an argument."""
    # Only the modules among the arguments get their changes back.
    if isinstance(fun, nnx.Module) and callable(fun):

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        return fun, call
    if inspect.ismethod(fun) and isinstance(fun.__self__, nnx.Module):
        name = fun.__name__

        def method(module: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(module, name)(*args, **kwargs)

        return fun.__self__, method
    return None, fun
