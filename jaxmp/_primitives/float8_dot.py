"""Which products run in float8, and the function that hand-written code and Flax layers call."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

from jaxmp._numerics.precision import is_own
from jaxmp._policies.recipe import Recipe, get_recipe
from jaxmp._primitives.bilinear import without_caller
from jaxmp._primitives.float8_product import float8_product
from jaxmp._primitives.mixed_product import product
from jaxmp._program.scopes import NOT_FLOAT8

_FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def dot_general(
    lhs: Num[Array, "..."],
    rhs: Num[Array, "..."],
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    recipe: str | Recipe | None = "tensorwise",
    parameter: int = 1,
) -> Num[Array, "..."]:
    """Multiplies by a weight in float8, forward and backward; in place of `jax.lax.dot_general`.

    For hand-written code, and for the `dot_general=` of layers. `jaxmp.autocast` and the policies
    of Flax models do the same for whole models. The weight may stay float32: then it is rounded
    once, and its gradient is float32.

    Args:
      lhs: the left operand, of 16 or 32 bits. Activations should have 16.
      rhs: the right operand.
      dimension_numbers: as for `jax.lax.dot_general`.
      precision: as for `jax.lax.dot_general`. A product that asks for one is not in float8.
      preferred_element_type: the dtype of the result; the dtype of the activation by default.
      out_sharding: as for `jax.lax.dot_general`. A product that says one is not in float8.
      recipe: a recipe or its name; None for a product in the dtype of the activation.
      parameter: which operand is the weight: 0 or 1.

    Returns:
      The product. If a product is left out, it is computed in the dtype of the activation, and
      `jaxmp.audit` says why: sizes that are no multiples of 16 or, on a GPU, too small; nothing
      that is summed; vectors; float64, complex numbers and integers.

    Raises:
      ValueError: for an unknown recipe, or a `parameter` that is not 0 or 1.

    >>> x, w = jnp.ones((32, 16), jnp.bfloat16), jnp.full((16, 48), 0.3)
    >>> dot_general(x, w, (((1,), (0,)), ((), ())))[0, 0]  # 16 times 0.3125
    Array(5, dtype=bfloat16)
    """
    if parameter not in (0, 1):
        raise ValueError(f"parameter must be 0 (lhs) or 1 (rhs), got {parameter!r}")
    activation, weight = (lhs, rhs) if parameter else (rhs, lhs)
    params = {
        "dimension_numbers": tuple(
            tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers
        ),
        "precision": _precision_param(
            tuple(precision) if isinstance(precision, list) else precision,
            jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        ),
        "preferred_element_type": np.dtype(preferred_element_type or activation.dtype),
        "out_sharding": out_sharding,
    }
    chosen = get_recipe(recipe)
    avals = [jax.typeof(lhs), jax.typeof(rhs)]
    reason = None if chosen is None else why_not_float8(params, avals, chosen, parameter)
    if chosen is not None and reason is None:
        return float8_product(params, lhs, rhs, chosen, parameter)
    with jax.named_scope(NOT_FLOAT8 + (reason or "no recipe")):
        if weight.dtype == activation.dtype or {lhs.dtype, rhs.dtype} - set(_FLOATS):
            return lax.dot_general(lhs, rhs, **params)
        narrow = lax.convert_element_type(weight, activation.dtype)
        operands, sources = [lhs, narrow], [None, weight]
        if not parameter:
            operands, sources = [narrow, rhs], [weight, None]
        return product(lax.dot_general_p, params, operands, sources)


@functools.lru_cache(maxsize=64)
def _precision_param(precision: Any, option: Any) -> Any:
    """Returns a precision as the primitive has it: no string, no None where an option is set."""
    del option  # `jax_default_matmul_precision`, a key of the cache
    # As JAX itself makes it of a product: the rules are not public.
    number = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    with without_caller():
        jaxpr = jax.make_jaxpr(functools.partial(lax.dot, precision=precision))(number, number)
    return jaxpr.eqns[0].params["precision"]


def why_not_float8(
    params: Mapping[str, Any], avals: Sequence[Any], recipe: Recipe, parameter: int
) -> str | None:
    """Returns why a product of two such operands is left out of float8; None if it is not."""
    if is_own(params.get("precision")):
        return "it asks for a precision"
    if params.get("out_sharding") is not None:
        return "it says an out_sharding"
    if any(aval.dtype not in _FLOATS for aval in avals):
        return "operands are not float32, bfloat16 or float16"
    sums, shared = params["dimension_numbers"]
    sizes = [
        math.prod(n for i, n in enumerate(aval.shape) if i not in (*sums[side], *shared[side]))
        for side, aval in enumerate(avals)
    ]
    ndim_not_free = len(sums[0]) + len(shared[0])
    if not sums[0] or any(aval.ndim == ndim_not_free for aval in avals):
        return "it is no product of matrices"
    depth = math.prod(avals[0].shape[i] for i in sums[0])
    return recipe.why_not(sizes[1 - parameter], depth, sizes[parameter])
