"""The float8 products of Flax layers: by their `dot_general`, with the kernel as it is stored."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from flax.linen.dtypes import promote_dtype as promote_dtype_of_linen
from flax.nnx.nn.dtypes import promote_dtype as promote_dtype_of_nnx
from jax import lax

from jaxmp._jaxpr.scopes import NOT_FLOAT8
from jaxmp._numerics.precision import is_own
from jaxmp._numerics.user_warnings import warn_once
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import Decision, PolicyRules
from jaxmp._policies.presets import all_policies, family_left_out
from jaxmp._policies.recipe import Recipe
from jaxmp._primitives.float8_dot import dot_general

_LINEN, _NNX = (nn.Dense, nn.DenseGeneral), (nnx.Linear, nnx.LinearGeneral)
_EINSUMS = (nn.Einsum, nnx.Einsum)
_USES = frozenset({"dot_general", "super", "__call__"})
_KEPT_AS_STORED = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class LayerProducts:
    """A `dot_general` of layers: a value, so that nnx can compare the models that hold it.

    Attributes:
      recipe: how to multiply in float8; None to multiply as JAX does.
      left_out: why there is no recipe, for audits.

    >>> LayerProducts(Recipe()) == LayerProducts(Recipe())
    True
    """

    recipe: Recipe | None
    left_out: str | None = None

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
        asked = {
            "precision": precision,
            "preferred_element_type": preferred_element_type,
            "out_sharding": out_sharding,
        }
        if self.recipe is not None:
            return dot_general(lhs, rhs, dimension_numbers, recipe=self.recipe, **asked)
        with jax.named_scope(f"{NOT_FLOAT8}{self.left_out}"):
            return lax.dot_general(lhs, rhs, dimension_numbers, **asked)


# A kernel that is rounded to the compute dtype and then to float8 gets other codes than one that is
# rounded once, and its gradient would be rounded too.
def promote_but_kernel(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Casts the inputs and the bias of a linen layer, but not the kernel between them.

    >>> x, w = jnp.ones(2), jnp.ones(2)
    >>> [a.dtype.name for a in promote_but_kernel(x, w, dtype=jnp.bfloat16)]
    ['bfloat16', 'float32']
    """
    inputs, kernel, *others = arrays
    if kernel.dtype not in _KEPT_AS_STORED:
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


def product_attributes(module: Any, policy: Policy, left_out: str | None) -> dict[str, Any]:
    """Returns the attributes with which a layer multiplies as its policy says.

    Args:
      module: a module.
      policy: its policy.
      left_out: why this module is left out of float8, or None.

    Returns:
      `dot_general` and `promote_dtype`; nothing for other modules, under policies without float8,
      and for what the author of the layer has set himself.

    >>> sorted(product_attributes(nn.Dense(16), Policy("f32", "bf16", "f32"), None))
    []
    """
    is_layer = isinstance(module, (*_LINEN, *_NNX))
    if policy.products is None or not is_layer or what_is_own(module) is not None:
        return {}
    if left_out is not None:
        return {"dot_general": LayerProducts(None, left_out)}
    promotion = promote_but_kernel if isinstance(module, nn.Module) else promote_all_but_kernel
    attributes: dict[str, Any] = {"promote_dtype": promotion}
    if not _is_float8_dot(module.dot_general):
        attributes["dot_general"] = LayerProducts(policy.products)
    return attributes


def what_is_own(module: Any) -> str | None:
    """Returns what of a layer's products its author has written himself; None for nothing.

    >>> what_is_own(nn.Dense(16)), what_is_own(nn.Dense(16, dot_general=max))
    (None, 'dot_general')
    """
    if not isinstance(module, (*_LINEN, *_NNX)):
        return "einsum" if isinstance(module, _EINSUMS) else None
    if getattr(module, "dot_general_cls", None) is not None:
        return "dot_general_cls"
    product = module.dot_general
    usual = product is None or product is lax.dot_general or isinstance(product, LayerProducts)
    if not usual and not _is_float8_dot(product):
        return "dot_general"
    if all(module.promote_dtype is not each for each in _PROMOTIONS):
        return "promote_dtype"
    cls: Any = type(module)
    return "__call__" if _multiplies_in_its_own_way(cls) else None


def _is_float8_dot(function: Any) -> bool:
    """Whether the author of a layer has set `jaxmp.float8.dot_general`, perhaps with a recipe."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inner is dot_general


@functools.lru_cache(maxsize=512)
def _multiplies_in_its_own_way(cls: type) -> bool:
    """Whether a subclass does not use its `dot_general`: a kernel that is not cast would widen it.

    Only the names in its code tell. It may also call the method of its base class.
    """
    for base in cls.__mro__:
        if base in (*_LINEN, *_NNX):
            break
        method = vars(base).get("__call__")
        if method is None or base.__module__.startswith("flax."):
            continue
        names = getattr(getattr(inspect.unwrap(method), "__code__", None), "co_names", ())
        if not _USES & {*names}:
            return True
    return False


def has_float8(rules: PolicyRules) -> bool:
    """Whether a policy in rules asks for products in float8."""
    return any(policy.products is not None for policy in all_policies(rules))


def family_of(
    path: str, module: Any, decision: Decision, found: Mapping[str, str | None]
) -> str | None:
    """Returns the family for which a module is left out of float8; None if it is not.

    What a rule puts in is not left out, and nor is what is in it.

    Args:
      path: the path of the module.
      module: the module.
      decision: the decision of the rules.
      found: the results for modules around it, by their paths.

    >>> policy = Policy("f32", "bf16", "f32", products="tensorwise")
    >>> by_default = Decision(policy, None)
    >>> family_of("lm_head/Dense_0", None, by_default, {"": None})
    'heads'
    >>> family_of("lm_head/Dense_0", None, by_default, {"": None, "lm_head": None}) is None
    True
    """
    policy, rule = decision
    if rule is not None and policy is not None and policy.products is not None:
        return None
    names = path.split("/") if path else []
    outer = [end for end in range(len(names)) if "/".join(names[:end]) in found]
    start = max(outer, default=0)
    around = found.get("/".join(names[:start]))
    return around or family_left_out("/".join(names[start:]), module)


def float8_text(module: Any, kernel: Any) -> str:
    """Returns what a summary adds to the compute dtype of a layer.

    Args:
      module: a module.
      kernel: its kernel, perhaps in a box with its sharding; None if it has none.

    Returns:
      Text with the recipe, or nothing for a module whose products are not in float8.
    """
    products = getattr(module, "dot_general", None)
    recipe = products.recipe if isinstance(products, LayerProducts) else None
    arrays = jax.tree.leaves(kernel)
    if recipe is None or not arrays or is_own(getattr(module, "precision", None)):
        return ""
    shape = arrays[0].shape
    axis = getattr(module, "axis", -1)
    features = getattr(module, "features", getattr(module, "out_features", 1))
    count, own = (1 if isinstance(each, int) else len(each) for each in (axis, features))
    # Batch dimensions come first, and so do layers that are stacked for a scan.
    summed, columns = math.prod(shape[-own - count : -own]), math.prod(shape[-own:])
    # How many rows there are is known at a call.
    return "" if recipe.why_not(0, summed, columns) else f", products float8 ({recipe})"


def own_products(
    path: str, module: Any, decision: Decision, left_out: str | None, *, strict: bool
) -> str | None:
    """Returns what of a layer's products its author wrote, if its policy wants them in float8.

    Args:
      path: the path of the module.
      module: the module.
      decision: the decision of the rules.
      left_out: why the module is left out of float8, or None.
      strict: whether it is an error if a rule names the module.

    Raises:
      ValueError: if it is an error.
    """
    policy, rule = decision
    if policy is None or policy.products is None or left_out is not None:
        return None
    own = what_is_own(module)
    if own is not None and rule is not None and strict:
        raise ValueError(
            f"{type(module).__name__} at {path or '(root)'!r} cannot follow its rule into float8: "
            f"it keeps its own {own}. {_REMEDY}"
        )
    return own


_REMEDY = (
    "jaxmp.float8.dot_general as the dot_general of a layer puts it in; or give it a policy "
    "without products in float8 by a rule"
)


def warn_of_own_products(model: Any, own: Mapping[str, str], *, again: bool = True) -> None:
    """Warns of layers that are not in float8 because their authors wrote their products.

    Args:
      model: the model.
      own: what of each layer is its own, by the path of the layer.
      again: whether to repeat a warning that was given for this class before.
    """
    if not own:
        return
    shown = ", ".join(f"{path or '(root)'!r} ({own[path]})" for path in list(own)[:4])
    more = f" and {len(own) - 4} more" if len(own) > 4 else ""
    warn_once(
        f"layers keep products of their own, which are not in float8: {shown}{more}. {_REMEDY}",
        type(model),
        again=again,
    )
