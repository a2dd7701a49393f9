"""The float8 products of Flax layers: by their `dot_general`, with the kernel as it is stored."""

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from flax.linen.dtypes import promote_dtype as promote_dtype_of_linen
from flax.nnx.nn.dtypes import promote_dtype as promote_dtype_of_nnx
from jax import lax

from jaxmp._numerics.precision import is_own
from jaxmp._policies.policy import Policy
from jaxmp._policies.recipe import Recipe
from jaxmp._primitives.float8_dot import dot_general

_LINEN, _NNX = (nn.Dense, nn.DenseGeneral), (nnx.Linear, nnx.LinearGeneral)
_LAYERS = (*_LINEN, *_NNX)
_EINSUMS = (nn.Einsum, nnx.Einsum)
_USES = frozenset({"dot_general", "super", "__call__"})
_KERNEL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class LayerProducts:
    """A `dot_general` of layers: a value, so that nnx can compare the models that have it.

    Attributes:
      recipe: how to multiply in float8.

    >>> LayerProducts(Recipe()) == LayerProducts(Recipe())
    True
    """

    recipe: Recipe

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Any:
        """Multiplies inputs by a kernel."""
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            recipe=self.recipe,
        )


# A kernel that is rounded to the compute dtype and then to float8 gets other codes than one that is
# rounded once, and its gradient would be rounded too. Pickles of nnx models record the names of
# these two functions.
def promote_but_kernel(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Casts the inputs and the bias of a linen layer, but not the kernel between them.

    >>> x, w = jnp.ones(2), jnp.ones(2)
    >>> [a.dtype.name for a in promote_but_kernel(x, w, dtype=jnp.bfloat16)]
    ['bfloat16', 'float32']
    """
    inputs, kernel, *others = arrays
    # Flax casts a kernel of another dtype, such as float64, as it casts the inputs.
    if kernel.dtype not in _KERNEL_DTYPES:
        return promote_dtype_of_linen(*arrays, dtype=dtype, inexact=inexact)
    inputs, *others = promote_dtype_of_linen(inputs, *others, dtype=dtype, inexact=inexact)
    return [inputs, jnp.asarray(kernel), *others]


def promote_all_but_kernel(arrays: Any, /, **options: Any) -> Any:
    """Casts the inputs and the bias of an nnx layer, but not the kernel between them."""
    return tuple(promote_but_kernel(*arrays, **options))


_PROMOTIONS = (
    *(promote_dtype_of_linen, promote_dtype_of_nnx),
    *(promote_but_kernel, promote_all_but_kernel),
)


def product_attributes(module: Any, policy: Policy, family: str | None) -> dict[str, Any]:
    """Returns the attributes with which a layer multiplies as its policy says.

    These are `dot_general` and `promote_dtype`. There are none for other modules, under policies
    without float8, for a family that is left out, and for a layer with products of its author.

    >>> sorted(product_attributes(nn.Dense(16), Policy("f32", "bf16", "f32"), None))
    []
    """
    if policy.products is None or family is not None:
        return {}
    if not has_dot_general(module) or custom_part(module) is not None:
        return {}
    promotion = promote_but_kernel if isinstance(module, nn.Module) else promote_all_but_kernel
    attributes: dict[str, Any] = {"promote_dtype": promotion}
    if not _is_float8_dot(module.dot_general):
        attributes["dot_general"] = LayerProducts(policy.products)
    return attributes


def has_dot_general(module: Any) -> bool:
    """Whether this is a layer with a `dot_general`, which a policy can put in float8."""
    return isinstance(module, _LAYERS)


def custom_part(module: Any) -> str | None:
    """Returns the part of a layer's products that its author has written; None for none.

    >>> custom_part(nn.Dense(16)), custom_part(nn.Dense(16, dot_general=max))
    (None, 'dot_general')
    """
    if not has_dot_general(module):
        return "einsum" if isinstance(module, _EINSUMS) else None
    if getattr(module, "dot_general_cls", None) is not None:
        return "dot_general_cls"
    product = module.dot_general
    usual = product is None or product is lax.dot_general or isinstance(product, LayerProducts)
    if not usual and not _is_float8_dot(product):
        return "dot_general"
    if all(module.promote_dtype is not promotion for promotion in _PROMOTIONS):
        return "promote_dtype"
    cls: Any = type(module)
    return "__call__" if _overrides_product(cls) else None


def _is_float8_dot(function: Any) -> bool:
    # The author may have set `jaxmp.float8.dot_general`, and a recipe by functools.partial.
    inner = function.func if isinstance(function, functools.partial) else function
    return inner is dot_general


@functools.lru_cache(maxsize=512)
def _overrides_product(cls: type) -> bool:
    """Whether a subclass does not use its `dot_general`."""
    # Its own product would be widened by a kernel that is not cast. Only the names in its code show
    # what it uses: `dot_general`, or the method of its base class, which uses that.
    for base in cls.__mro__:
        if base in _LAYERS:
            break
        method = vars(base).get("__call__")
        if method is None or base.__module__.startswith("flax."):
            continue
        names = getattr(getattr(inspect.unwrap(method), "__code__", None), "co_names", ())
        if not _USES & {*names}:
            return True
    return False


def reason_left_out(module: Any, kernel: Any) -> str | None:
    """Returns why a layer under a policy for float8 is not in float8, by its params; or None."""
    if is_own(getattr(module, "precision", None)):
        return "it asks for a precision"
    recipe = getattr(module.dot_general, "recipe", None)
    arrays = jax.tree.leaves(kernel)  # a kernel may be in a box with its sharding
    if recipe is None or not arrays:
        return None
    shape = arrays[0].shape
    axis = getattr(module, "axis", -1)
    features = getattr(module, "features", getattr(module, "out_features", 1))
    ins, outs = (1 if isinstance(axes, int) else len(axes) for axes in (axis, features))
    # Batch dimensions come first, and so do layers that are stacked for a scan.
    contracted, columns = math.prod(shape[-outs - ins : -outs]), math.prod(shape[-outs:])
    # The number of rows is known only at a call.
    reason: str | None = recipe.why_not(0, contracted, columns)
    return reason


def float8_text(module: Any, kernel: Any) -> str:
    """Returns the recipe for a summary; `""` for a module whose products are not in float8."""
    products = getattr(module, "dot_general", None)
    if not isinstance(products, LayerProducts) or kernel is None:
        return ""
    recipe = products.recipe
    return "" if reason_left_out(module, kernel) else f", products {recipe.codes} ({recipe})"
