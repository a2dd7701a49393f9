"""Decides the casts around a module's call under a policy, and runs it with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._flax.layer_precision import computes_in_float32, exactly
from jaxmp._numerics.dtypes import DType, is_floating
from jaxmp._numerics.tree import cast_floating, same_structure
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import Decision
from jaxmp._program.scopes import NOT_FLOAT8


class ModulePolicy(NamedTuple):
    """A module's policy, and its place in the model as far as casts depend on it.

    Attributes:
      decision: the decision of the rules for the module.
      caller: the decision for the calling module; None if the call comes from outside the model.
      takes_dtype: whether the module has a `dtype`, and so casts its inputs and params itself.
      recurrent: whether it takes and returns a carry, like recurrent cells.
      by_field: whether its products take their precision from its `precision` alone.
    """

    decision: Decision
    caller: Decision | None
    takes_dtype: bool
    recurrent: bool
    by_field: bool = False


class Casts(NamedTuple):
    """The casts around a call; None means no cast.

    Attributes:
      inputs: the dtype to cast floating arguments to.
      output: the dtype to cast the result to.
      recurrent: whether the call takes and returns a carry, which keeps its dtype.
      exact: the policy whose precision the products in the call are told to ask for.
      not_float8: why a policy with products in float8 leaves those in the call out, for audits.
    """

    inputs: DType | None = None
    output: DType | None = None
    recurrent: bool = False
    exact: Policy | None = None
    not_float8: str | None = None

    def __bool__(self) -> bool:
        return any(self)


def casts_around(region: ModulePolicy) -> Casts:
    """Returns the casts around a call that its policy requires.

    Within a region of one policy, only the layers themselves cast: a cast to the output dtype
    after every layer would double what the backward pass keeps. Results that leave the region are
    cast to the output dtype of its policy. Recurrent cells mix in their float32 carry, and would
    return float32 whatever their dtype. So their outputs are cast, and their carry keeps its
    dtype, as a scan requires.

    >>> from jaxmp import get_policy
    >>> policy = get_policy("mixed_bfloat16")
    >>> by_default = Decision(policy, None)
    >>> casts_around(ModulePolicy(by_default, None, takes_dtype=True, recurrent=False)).output
    dtype('float32')
    >>> casts_around(ModulePolicy(by_default, by_default, takes_dtype=True, recurrent=False)).output
    """
    policy = region.decision.policy
    if policy is None:
        return Casts()
    named = region.decision.rule is not None
    exact = policy if _asks(region) else None
    caller = region.caller and region.caller.policy
    # How a caller multiplies is no reason to cast what it is given.
    if caller is None or caller.with_products(None) != policy.with_products(None):
        inputs = policy.compute_dtype if named and not region.takes_dtype else None
        return Casts(inputs, policy.output_dtype, region.recurrent, exact)
    output = policy.compute_dtype if region.recurrent else None
    return Casts(None, output, region.recurrent, exact)


def leaving_out(casts: Casts, policy: Policy | None, family: str | None) -> Casts:
    """Returns casts that also say why the products in a call are left out of float8, if they are.

    Args:
      casts: the casts.
      policy: the policy of the module.
      family: why it is left out, or None.
    """
    if family is None or policy is None or policy.products is None:
        return casts
    return casts._replace(not_float8=family)


def _asks(region: ModulePolicy) -> bool:
    """Whether products in a call must be told what they ask for: in float32, and below float32."""
    policy, caller = region.decision.policy, region.caller and region.caller.policy
    if policy is None or computes_in_float32(policy):
        return policy is not None and not region.by_field
    # A TPU refuses what float32 products around the call ask for in a 16-bit `ragged_dot`.
    return caller is not None and computes_in_float32(caller)


def call_with_casts(
    call: Callable[..., Any],
    casts: Casts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_opaque: Callable[[Any], bool] | None = None,
) -> Any:
    """Calls a function with its floating inputs and outputs cast.

    Args:
      call: the function.
      casts: the result of `casts_around`.
      args: its positional arguments; the first is the carry of a recurrent cell.
      kwargs: its keyword arguments.
      is_opaque: whether a pytree must be passed on unchanged.

    Returns:
      The result of the call, cast.
    """

    def cast(tree: PyTree, dtype: DType | None) -> PyTree:
        if dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x if is_opaque and is_opaque(x) else cast_floating(x, dtype),
            tree,
            is_leaf=is_opaque,
        )

    if casts.exact is not None:
        call = exactly(call, casts.exact)
    if casts.not_float8 is not None:
        call = jax.named_scope(NOT_FLOAT8 + casts.not_float8)(call)
    if not casts.recurrent:
        args, kwargs = cast((args, kwargs), casts.inputs)
        return cast(call(*args, **kwargs), casts.output)
    carry = args[0] if args else kwargs.get("carry")
    out = call(*args, **kwargs)
    if same_structure(out, carry):  # the classes that nn.remat_scan repeats return only a carry
        return _cast_like(out, carry)
    new_carry, out = out
    return _cast_like(new_carry, carry), cast(out, casts.output)


def _cast_like(tree: PyTree, like: PyTree) -> PyTree:
    if not same_structure(tree, like):
        return tree

    def cast_leaf(x: Any, y: Any) -> Any:
        return cast_floating(x, y.dtype) if is_floating(x) and is_floating(y) else x

    return jax.tree.map(cast_leaf, tree, like)


def layer_dtype(dtype: DType, before: Any = None) -> Any:
    """Returns a dtype in the form that the layer had before; `jnp.bfloat16` by default.

    >>> layer_dtype(jnp.dtype("bfloat16")) is jnp.bfloat16
    True
    >>> layer_dtype(jnp.dtype("bfloat16"), "float32")
    'bfloat16'
    """
    if isinstance(before, np.dtype):
        return dtype
    return dtype.name if isinstance(before, str) else getattr(jnp, dtype.name)


def takes_float_dtype(dtype: Any) -> bool:
    """Whether a layer with this `dtype` computes in floats, or in the dtype of its inputs (None).

    >>> takes_float_dtype(None), takes_float_dtype("bfloat16"), takes_float_dtype(jnp.complex64)
    (True, True, False)
    """
    try:
        return dtype is None or bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
