"""Decides the casts around a module's call under a policy, and runs it with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._flax.layer_precision import computes_in_float32, with_precision
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
      by_field: whether its products take their precision from its `precision` alone. In
        linen all take it from around their call too.
    """

    decision: Decision
    caller: Decision | None
    takes_dtype: bool
    recurrent: bool
    by_field: bool = False


class Casts(NamedTuple):  # pickles of nnx models record its name
    """The casts around a call; None means no cast.

    Attributes:
      inputs: the dtype to cast floating arguments to.
      output: the dtype to cast the result to.
      recurrent: whether the call takes and returns a carry, which keeps its dtype.
      exact: the policy that sets the precision of the products in the call.
      not_float8: the family for which the products in the call stay out of float8, for audits.
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

    Within a region of one policy, only the layers themselves cast. Results that leave the region
    are cast to the output dtype of its policy.

    >>> from jaxmp import get_policy
    >>> policy = get_policy("mixed_bfloat16")
    >>> by_default = Decision(policy, None)
    >>> casts_around(ModulePolicy(by_default, None, takes_dtype=True, recurrent=False)).output
    dtype('float32')
    >>> casts_around(ModulePolicy(by_default, by_default, takes_dtype=True, recurrent=False)).output
    """
    policy, rule = region.decision
    if policy is None:
        return Casts()
    caller = region.caller and region.caller.policy
    if computes_in_float32(policy):
        has_precision = not region.by_field
    else:
        # A TPU refuses a 16-bit `ragged_dot` with the precision of float32 products around it.
        has_precision = caller is not None and computes_in_float32(caller)
    exact = policy if has_precision else None
    # A caller that only multiplies in another way returns and takes the same dtypes.
    if caller is None or caller.with_products(None) != policy.with_products(None):
        inputs = None if rule is None or region.takes_dtype else policy.compute_dtype
        return Casts(inputs, policy.output_dtype, region.recurrent, exact)
    # A cast to the output dtype after every layer would double what the backward pass keeps. But
    # recurrent cells mix in their float32 carry, and would return float32 whatever their dtype.
    output = policy.compute_dtype if region.recurrent else None
    return Casts(None, output, region.recurrent, exact)


def with_family(casts: Casts, policy: Policy | None, family: str | None) -> Casts:
    """Returns casts that also name the family for which products stay out of float8, if they do."""
    if family is None or policy is None or policy.products is None:
        return casts
    return casts._replace(not_float8=family)


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
        call = with_precision(call, casts.exact)
    if casts.not_float8 is not None:
        call = jax.named_scope(NOT_FLOAT8 + casts.not_float8)(call)
    if not casts.recurrent:
        args, kwargs = cast((args, kwargs), casts.inputs)
        return cast(call(*args, **kwargs), casts.output)
    # A scan requires that the carry keeps its dtype.
    carry = args[0] if args else kwargs.get("carry")
    if args or "carry" in kwargs:  # a carry under another name is not told from inputs
        others = {name: x for name, x in kwargs.items() if name != "carry"}
        args = (*args[:1], *cast(args[1:], casts.inputs))
        kwargs = {**kwargs, **cast(others, casts.inputs)}
    out = call(*args, **kwargs)
    # The classes that nn.remat_scan repeats return only a carry.
    if same_structure(out, carry):
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
    except TypeError:  # an author's own text, such as "bf16"
        return False
