"""Gradients of functions of Equinox modules, by the float arrays in them."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax

from jaxmp._autocast.api import autocast
from jaxmp._equinox.module_policy import has_policy
from jaxmp._numerics.tree import leaf_names
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._training.gradient_options import GradientKeywords
from jaxmp._training.gradients import value_and_grad, without_value


def filter_value_and_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, **options: Unpack[GradientKeywords]
) -> Callable[..., Any]:
    """Differentiates like `equinox.filter_value_and_grad`; loss and gradients are unscaled float32.

    A module has functions, flags and integers besides its params, which `jax.grad` refuses. This
    is `jaxmp.value_and_grad` for the floating arrays in the first argument. The rest of that
    argument is passed on as it is, and has None for a gradient. A model under a policy runs under
    autocast; operations outside of it, such as the loss, stay as they were written.

    Args:
      fun: a function of a module, or of any pytree, that returns a scalar float loss, or
        `(loss, aux)`. `aux` may be a new `equinox.nn.State`.
      has_aux: whether `fun` returns `(loss, aux)`.
      **options: the keyword arguments of `jaxmp.value_and_grad`. With microbatches all positional
        arguments but the first are split: name those of the batch by `batch_argnums` if another
        argument is a module or a state. The shardings of `fsdp` have the structure of the
        gradients.

    Returns:
      A function with the arguments of `fun` that returns `(loss, grads)`, or
      `((loss, aux), grads)`. The gradients have the structure of
      `equinox.filter(module, equinox.is_inexact_array)`, which is what the optimizer was
      initialised with.

    Raises:
      TypeError: if the first argument holds no floating array, or the loss is not a float scalar.
      ValueError: as `jaxmp.value_and_grad` does.

    >>> import jax.numpy as jnp
    >>> model = eqx.nn.MLP(2, 1, width_size=4, depth=1, key=jax.random.key(0))
    >>> loss_fn = lambda model, x: model(x).sum()
    >>> loss, grads = filter_value_and_grad(loss_fn, loss_scale=1024.0)(model, jnp.ones(2))
    >>> grads.layers[-1].bias, grads.activation is None
    (Array([1.], dtype=float32), True)
    """
    # Wrong options raise here, not in the first call.
    value_and_grad(lambda: None, 0, has_aux, **options)

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        # `jax.grad` refuses the functions, flags and integers in a module.
        params, static = eqx.partition(model, eqx.is_inexact_array)
        if not jax.tree.leaves(params):
            pairs = zip(leaf_names(model), jax.tree.leaves(model), strict=True)
            names = ", ".join(f"{name} ({type(x).__name__})" for name, x in pairs)
            raise TypeError(
                "the first argument holds no floating array to differentiate, but "
                f"{names or 'no leaf'}. Give the model first, and static parts after it"
            )

        @functools.wraps(fun, updated=())
        def of_params(params: Any, /, *args: Any, **kwargs: Any) -> Any:
            return fun(eqx.combine(params, static), *args, **kwargs)

        # Autocast around the whole loss sees the batch: around the model alone, under vmap, a bias
        # is as large as the activations. Operations outside of modules stay as they were traced.
        is_low = has_policy((model, args, kwargs))
        loss_fn = autocast(of_params, PolicyRules()) if is_low else of_params
        return value_and_grad(loss_fn, 0, has_aux, **options)(params, *args, **kwargs)

    return value_and_grad_fun


def filter_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, **options: Unpack[GradientKeywords]
) -> Callable[..., Any]:
    """Differentiates like `filter_value_and_grad`, but does not return the value; see there.

    Args:
      fun: a function of a module that returns a scalar float loss, or `(loss, aux)`.
      has_aux: whether `fun` returns `(loss, aux)`.
      **options: the keyword arguments of `jaxmp.value_and_grad`.

    Returns:
      A function that returns `grads`, or `(grads, aux)`.

    >>> import jax.numpy as jnp
    >>> layer = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    >>> filter_grad(lambda layer, x: layer(x).sum(), loss_scale=8.0)(layer, jnp.ones(2)).weight
    Array([[1., 1.]], dtype=float32)
    """
    return without_value(filter_value_and_grad(fun, has_aux=has_aux, **options), has_aux)
