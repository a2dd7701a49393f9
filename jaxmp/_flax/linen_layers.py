"""Sets the dtypes of bound linen modules, and rounds the params that they make."""

import dataclasses
import inspect
from typing import Any

from flax import linen as nn
from jaxtyping import PyTree

from jaxmp._flax.layer_precision import layer_precision
from jaxmp._flax.layer_products import product_attributes
from jaxmp._flax.module_casts import layer_dtype, takes_float_dtype
from jaxmp._numerics.dtypes import at_least_float32
from jaxmp._numerics.tree import cast_floating
from jaxmp._policies.policy_rules import Decision

# Not None, which is a dtype of layers: they follow their inputs.
_MISSING: Any = object()


def linen_takes_dtype(module: nn.Module) -> bool:
    fields = {field.name for field in dataclasses.fields(module)}
    return "dtype" in fields and takes_float_dtype(getattr(module, "dtype", None))


def is_linen_layer(module: nn.Module) -> bool:
    """Whether this module is a layer of Flax, whose inner layers Flax's own code makes."""
    # An author's module has `nn.Module` of Flax among its bases, but declares its `dtype` itself.
    return linen_takes_dtype(module) and any(
        base.__module__.startswith("flax.") and "dtype" in inspect.get_annotations(base)
        for base in type(module).__mro__
    )


def set_dtypes(module: nn.Module, decision: Decision, family: str | None) -> None:
    """Sets the dtypes of a bound module."""
    # Flax binds a copy of the module for each init or apply, so the author's module stays as it is.
    policy = decision.policy
    if policy is None:
        return
    if linen_takes_dtype(module):
        # These two make the weight of their inner layer, and that layer casts the weight itself.
        makes_weights = isinstance(module, (nn.SpectralNorm, nn.WeightNorm))
        weight_dtype = at_least_float32(policy.param_dtype)
        dtype = weight_dtype if makes_weights else policy.compute_dtype
        dtype = layer_dtype(dtype, module.dtype)
        object.__setattr__(module, "dtype", dtype)
        if any(field.name == "precision" for field in dataclasses.fields(module)):
            object.__setattr__(module, "precision", layer_precision(module, policy))
        for name, value in product_attributes(module, policy, family).items():
            object.__setattr__(module, name, value)
    before = getattr(module, "param_dtype", _MISSING)
    if takes_float_dtype(before):
        # Params are drawn in float32 and rounded by round_new_params. So all policies start from
        # the same values, batch statistics that follow param_dtype stay float32, and no
        # initializer gets a dtype that its linear algebra does not support.
        dtype = at_least_float32(policy.param_dtype)
        object.__setattr__(module, "param_dtype", layer_dtype(dtype, before))


def round_new_params(module: nn.Module, decision: Decision, before: frozenset[str]) -> None:
    """Rounds the params that a call created, but not those that existed before."""
    if decision.policy is None:
        return
    for name, value in params_of_linen(module).items():
        if name not in before:
            value = cast_floating(value, decision.policy.param_dtype)
            module.put_variable("params", name, value)


def params_of_linen(module: nn.Module) -> dict[str, PyTree]:
    """Returns the own params of a module, without the params of its submodules."""
    params = module.variables.get("params", {})
    reserved: Any = module.scope.reservations  # type: ignore[union-attr]
    return {name: value for name, value in params.items() if "params" in reserved.get(name, ())}
