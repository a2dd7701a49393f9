"""The state of delayed scaling: the largest magnitudes of the last steps, and how they are used.

The state is an ordinary input of a function, and the magnitudes of a step are ordinary results.
Those of cotangents, which only the backward pass knows, are gradients of zeros. So one update for
each step runs outside of differentiation, and nothing else has to know the state.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxmp._delayed_scaling.places import (
    Places,
    PlaceValues,
    operations_not_entered,
    places_of,
    run_with_scales,
)
from jaxmp._numerics.user_warnings import warn
from jaxmp._program.compat import open_jaxpr
from jaxmp._program.tracing import combine, partition, trace_call


class Float8State(NamedTuple):
    """The largest magnitudes of the last steps, for each use of a product in float8.

    Attributes:
      forward: for each operand that is rounded, in the order of the program, a float32 array whose
        last axis is the history, latest first. Of a product in a scan over layers, one axis before
        it runs over the layers.
      backward: the same for the cotangent of each product, without the loss scale.
    """

    forward: tuple[Float32[Array, "..."], ...]
    backward: tuple[Float32[Array, "..."], ...]


def init_state(fun: Callable[..., Any], *args: Any, history: int = 16) -> Float8State:
    """Makes the state of delayed scaling from one evaluation of a loss and its gradient.

    That evaluation scales by current magnitudes. A state of zeros would scale by 1 at the first
    step, and gradients below 1e-6 are zero in float8 then.

    Args:
      fun: the loss function under `jaxmp.autocast` with the recipe `tensorwise`, or that of a model
        under such a policy. It returns the loss, or a tuple that begins with it.
      *args: its arguments, as large as those of a step.
      history: of how many steps the magnitudes are kept.

    Returns:
      The state, to be stored with the params, as `TrainState.create(..., float8=...)` does.

    Raises:
      ValueError: if no product has one scale for each array, or `history` is not positive. A
        product in `cond`, `while`, `shard_map` or a function with a derivative of its own keeps
        current scaling, with a warning.

    >>> import jaxmp
    >>> fun = jaxmp.autocast(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_float8")
    >>> w, x = jnp.ones((16, 32)), jnp.full((4, 16), 3.0)
    >>> init_state(fun, w, x, history=2).forward
    (Array([3., 0.], dtype=float32), Array([1., 0.], dtype=float32))
    """
    if isinstance(history, bool) or not isinstance(history, int) or history < 1:
        raise ValueError(f"history must be a whole number of steps, at least 1; got {history!r}")
    static, arrays = partition((args, {}), numpy=False)
    closed = trace_call(fun, static, arrays, as_jit=True, numpy=False).closed
    equations = open_jaxpr(closed).eqns
    places = places_of(equations)
    names = ", ".join(sorted(set(operations_not_entered(equations))))
    # A function without places would get an empty state, and train without delayed scaling.
    if not any(places):
        inside = f" outside of {names}, where scaling is current" if names else ""
        raise ValueError(
            f"the function has no product in 8 bits with one scale for each array{inside}, and so "
            "no state. Put it under jaxmp.autocast(fun, 'mixed_float8'), or "
            "'mixed_int8'; jaxmp.audit says which products are left out of 8 bits, and why"
        )
    if names:
        warn(
            f"products in {names} scale by current magnitudes: delayed scaling goes into "
            "checkpoint, scan, and jit without shardings"
        )

    def loss(probes: list[Any], args: Any) -> Any:
        # None at each place: nothing is known before the first step.
        values = PlaceValues([None] * len(places.forward), [None] * len(probes), probes)
        out, forward = _scaled_function(fun)(values, *args)
        return jnp.asarray(out[0] if isinstance(out, tuple) else out, jnp.float32), forward

    probes = [jnp.zeros(place, jnp.float32) for place in places.backward]
    backward, forward = jax.jit(jax.grad(loss, has_aux=True))(probes, args)
    empty = ([jnp.zeros((*place, history), jnp.float32) for place in group] for group in places)
    return update(Float8State(*map(tuple, empty)), forward, backward)


def update(state: Float8State, forward: Iterable[Any], backward: Iterable[Any]) -> Float8State:
    """Returns the state after a step, with its magnitudes in place of the oldest ones.

    Args:
      state: the state.
      forward: the magnitudes that the function of `with_state` returned.
      backward: the gradients of the probes, without the loss scale, as `jaxmp.value_and_grad`
        returns them.

    Returns:
      The new state. A magnitude that is not finite is not stored: its history stays as it is.

    >>> state = Float8State((jnp.float32([3, 1]),), (jnp.float32([8, 8]),))
    >>> state = update(state, [jnp.float32(5)], [jnp.float32(jnp.inf)])
    >>> state.forward, state.backward
    ((Array([5., 3.], dtype=float32),), (Array([8., 8.], dtype=float32),))
    """

    def shift(history: Array, latest: Any) -> Array:
        shifted = jnp.concatenate([latest[..., None], history[..., :-1]], -1)
        # One inf would freeze the scale for as many steps as the history is long.
        return jnp.where(jnp.isfinite(latest)[..., None], shifted, history)

    pairs = zip(state, (list(forward), list(backward)), strict=True)
    return Float8State(*(tuple(map(shift, old, new)) for old, new in pairs))


def probes_of(state: Float8State) -> list[Array]:
    """Returns zeros, one for each cotangent of a state: their gradients are its magnitudes.

    Args:
      state: the state.

    Returns:
      Float32 zeros, in the order of the program, with an axis for each scan around a product.

    >>> probes_of(Float8State((), (jnp.ones((3, 16)),)))
    [Array([0., 0., 0.], dtype=float32)]
    """
    return [jnp.zeros(history.shape[:-1], jnp.float32) for history in state.backward]


def with_state(
    fun: Callable[..., Any],
    state: Float8State,
    probes: list[Any] | None = None,
    *,
    scale: Any = 1.0,
) -> Callable[..., tuple[Any, list[Array]]]:
    """Returns a function whose products in float8 are scaled by the magnitudes of earlier steps.

    No product waits for a maximum then. To evaluate, leave the probes out and drop the magnitudes:
    nothing changes the state but `update`. In a `shard_map`, the magnitudes are those of all
    devices, unless `check_vma=False` hides from JAX what differs between them.

    Args:
      fun: a function under `jaxmp.autocast` with the recipe `tensorwise`, or a model under such a
        policy.
      state: its state, from `init_state`. A history of zeros says nothing, and scales by 1.
      probes: the zeros of `probes_of`, to be differentiated together with the params. Their
        gradients are for `update`, and not for an optimizer. Do not add those of microbatches, but
        take the largest.
      scale: by how much the loss is multiplied.

    Returns:
      A function of the same arguments that returns the result, and the magnitudes for `update`.

    Raises:
      ValueError: when it is called, if the state is that of another program.

    >>> import jaxmp
    >>> fun = jaxmp.autocast(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_float8")
    >>> w, x = jnp.ones((16, 32)), jnp.full((4, 16), 3.0)
    >>> state = init_state(fun, w, x, history=2)
    >>> def loss(w, probes):
    ...     return with_state(fun, state, probes)(w, 2 * x)
    >>> both = jaxmp.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    >>> (_, forward), (_, backward) = both(w, probes_of(state))
    >>> update(state, forward, backward).forward[0]
    Array([6., 3.], dtype=float32)
    """
    forward, backward = ([jnp.max(history, -1) for history in group] for group in state)
    # The cotangents of a scaled loss are larger by the scale, and the state is without it.
    backward = [largest * scale for largest in backward]
    probes = [None] * len(backward) if probes is None else list(probes)
    return functools.partial(_scaled_function(fun), PlaceValues(forward, backward, probes))


def _scaled_function(fun: Callable[..., Any]) -> Callable[..., tuple[Any, list[Array]]]:
    """Returns the function, with the values for its places as a first argument."""

    @functools.wraps(fun, updated=())
    def call(values: PlaceValues, *args: Any, **kwargs: Any) -> tuple[Any, list[Array]]:
        static, arrays = partition((args, kwargs), numpy=False)
        traced = trace_call(fun, static, arrays, as_jit=True, numpy=False)
        closed = traced.closed
        _check_same_program(values, places_of(open_jaxpr(closed).eqns))

        def run(values: PlaceValues, arrays: list[Any]) -> list[Any]:
            results, magnitudes = run_with_scales(closed, arrays, values)
            return [*results, *magnitudes]

        # On explicit mesh axes every result has a spec. A magnitude is the same on all devices.
        specs = (*traced.axes.specs, *[jax.P()] * len(values.forward))
        results = traced.axes._replace(specs=specs).run(run, [values, arrays])
        count = len(closed.jaxpr.outvars)
        return combine(traced.returned, results[:count]), results[count:]

    return call


def _check_same_program(values: PlaceValues, places: Places) -> None:
    """Raises ValueError if a state is that of another program."""
    fits = all(
        len(arrays) == len(shapes)
        and all(x is None or x.shape == shape for x, shape in zip(arrays, shapes, strict=True))
        for arrays, shapes in zip(values, (*places, places.backward), strict=True)
    )
    if not fits:
        here = f"{len(places.forward)} operands and {len(places.backward)} cotangents"
        stored = f"{len(values.forward)} and {len(values.backward)}"
        raise ValueError(
            f"the float8 state is that of another program: the products here round {here}, the "
            f"state has {stored}, or layers in another number. Make it anew: "
            "jaxmp.float8.init_state(fun, *args)"
        )
