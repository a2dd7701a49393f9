"""The precision of the float32 products of Flax modules: by their field, and around their calls."""

import functools
from collections.abc import Callable
from typing import Any

from jaxmp._numerics.precision import as_param, default_precision, precision_of
from jaxmp._policies.policy import Policy


def computes_in_float32(policy: Policy) -> bool:
    """Whether the products of a policy are float32, or wider."""
    return policy.compute_dtype.itemsize >= 4


def layer_precision(module: Any, policy: Policy) -> Any:
    """Returns the `precision` of a layer under a policy: its own, or that of its float32 products.

    >>> import types
    >>> from jaxmp import get_policy
    >>> layer = types.SimpleNamespace(precision=None)
    >>> layer_precision(layer, get_policy("float32")), layer_precision(layer, get_policy("bf16"))
    (Precision.HIGHEST, None)
    """
    precision = precision_of(policy.precision)
    if module.precision is not None or precision is None or not computes_in_float32(policy):
        return module.precision
    # A convolution takes no `jax.lax.DotAlgorithmPreset`.
    return as_param(precision, algorithms=not hasattr(module, "kernel_size"))


def with_precision(call: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Returns a function whose products have the precision of a policy, whatever its caller has."""

    @functools.wraps(call, updated=())
    def precise(*args: Any, **kwargs: Any) -> Any:
        # Under a policy in 16 bits, products have the precision of the user's option of JAX.
        precision = precision_of(policy.precision) if computes_in_float32(policy) else None
        with default_precision(precision):
            return call(*args, **kwargs)

    return precise
