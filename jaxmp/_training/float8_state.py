"""The state of delayed scaling: the largest magnitudes of the last steps, and how they are used.

The state is an ordinary input of a loss function, and the magnitudes of a step are ordinary
results. Those of cotangents, which only the backward pass knows, are gradients of zeros. So one
update for each step stands outside of differentiation, and nothing else has to know the state.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
from jaxtyping import Array, Float32, PyTree

from jaxmp._autocast.api import autocast
from jaxmp._jaxpr.compat import open_jaxpr
from jaxmp._jaxpr.tracing import combine, partition, trace_call
from jaxmp._numerics.user_warnings import warn
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._primitives.float8_sites import (
    Float8Site,
    Float8Sites,
    Given,
    left_out,
    run_with_scales,
    sites_of,
)
from jaxmp._training.gradient_options import GradientOptions

# The name of the collection of a train state that holds it.
FLOAT8_STATE = "float8_state"
_HOW = (
    "float8_state=jaxmp.float8.init_state(loss_fn, policy, params, batch), with the collections of "
    "the loss function by name"
)


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


def init_state(
    loss_fn: Callable[..., Any],
    policy: str | jmp.Policy | PolicyRules | None,
    params: PyTree,
    batch: PyTree,
    **collections: PyTree,
) -> Float8State:
    """Makes the state of delayed scaling from one evaluation of the loss and its gradient.

    That evaluation scales by current magnitudes. A state of zeros would scale by 1 at the first
    step, and gradients below 1e-6 are zero in float8 then.

    Args:
      loss_fn: the loss function, as for `jaxmp.make_train_step`: `loss_fn(params, batch)`, or
        `loss_fn(params, batch, **collections)`. It returns the loss, or a tuple that begins with
        it.
      policy: the policy of the step, with a delayed recipe; None for a function that is under one
        already.
      params: the params.
      batch: a batch, as large as that of a step.
      **collections: the collections that the loss function takes.

    Returns:
      The state. Give it to `TrainState.create(..., float8_state=...)`.

    Raises:
      ValueError: if no product runs under a delayed recipe. A product in `cond`, `while`,
        `shard_map` or a function with a derivative of its own keeps current scaling, with a
        warning.

    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> w, x = jnp.ones((16, 32)), jnp.full((4, 16), 3.0)
    >>> state = init_state(loss_fn, "mixed_bfloat16,products=delayed:history=2", w, x)
    >>> state.forward
    (Array([3., 0.], dtype=float32), Array([1., 0.], dtype=float32))
    """
    fast = loss_fn if policy is None else autocast(loss_fn, policy)
    arguments = (params, batch)
    static, arrays = partition((arguments, collections), numpy=False)
    closed = trace_call(fast, static, arrays, as_jit=True, numpy=False).closed
    equations = open_jaxpr(closed).eqns
    sites = sites_of(equations)
    _check_sites(sites, sorted(set(left_out(equations))))

    def loss(probes: list[Any], arguments: Any, collections: Any) -> Any:
        given = Given([None] * len(sites.forward), [None] * len(probes), probes)
        out, seen = with_given(fast)(given, *arguments, **collections)
        return jnp.asarray(out[0] if isinstance(out, tuple) else out, jnp.float32), seen

    probes = [jnp.zeros(site.stack, jnp.float32) for site in sites.backward]
    gradient = jax.jit(jax.grad(loss, has_aux=True))
    found, seen = gradient(probes, arguments, collections)
    return update(_empty(sites), seen, found)


def _check_sites(sites: Float8Sites, without: list[str]) -> None:
    if not any(sites):
        inside = f" outside of {', '.join(without)}, where scaling is current" if without else ""
        raise ValueError(
            f"the loss function has no product under a delayed float8 recipe{inside}, and so no "
            "state. Name such a recipe in the policy, 'mixed_bfloat16,products=delayed'; "
            "jaxmp.audit says which products are left out of float8, and why"
        )
    if without:
        warn(
            f"products in {', '.join(without)} scale by current magnitudes: delayed scaling goes "
            "into checkpoint, scan, and jit without shardings"
        )


def _empty(sites: Float8Sites) -> Float8State:
    def zeros(site: Float8Site) -> Array:
        return jnp.zeros((*site.stack, site.history), jnp.float32)

    return Float8State(*(tuple(map(zeros, each)) for each in sites))


def update(
    state: Float8State, forward: Iterable[Any], backward: Iterable[Any], *, scale: Any = 1.0
) -> Float8State:
    """Returns the state after a step, with its magnitudes in place of the oldest ones.

    Args:
      state: the state.
      forward: the magnitudes that the function of `with_state` returned.
      backward: the gradients of the probes.
      scale: by how much the loss was multiplied, if the gradients of the probes were not divided
        by it.

    Returns:
      The new state. A magnitude that is not finite is not stored: its history stays as it is.

    >>> state = Float8State((jnp.float32([3, 1]),), (jnp.float32([8, 8]),))
    >>> state = update(state, [jnp.float32(5)], [jnp.float32(jnp.inf)])
    >>> state.forward, state.backward
    ((Array([5., 3.], dtype=float32),), (Array([8., 8.], dtype=float32),))
    """

    def rolled(history: Array, latest: Any) -> Array:
        moved = jnp.concatenate([latest[..., None], history[..., :-1]], -1)
        return jnp.where(jnp.isfinite(latest)[..., None], moved, history)

    unscaled = [latest / scale for latest in backward]
    found = (list(forward), unscaled)
    pairs = zip(state, found, strict=True)
    return Float8State(*(tuple(map(rolled, old, new)) for old, new in pairs))


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


def expected_of(state: Float8State, scale: Any = 1.0) -> tuple[list[Array], list[Array]]:
    """Returns the magnitudes to expect of operands, and of cotangents under a loss scale."""
    forward, backward = ([jnp.max(history, -1) for history in each] for each in state)
    return forward, [largest * scale for largest in backward]


def with_state(
    fun: Callable[..., Any],
    state: Float8State,
    probes: list[Any] | None = None,
    *,
    scale: Any = 1.0,
) -> Callable[..., tuple[Any, list[Array]]]:
    """Returns a function whose products in float8 are scaled by the magnitudes of earlier steps.

    For training steps of your own; `jaxmp.make_train_step` does this for a state that has the
    collection. To evaluate, leave the probes out and drop the magnitudes: nothing changes the
    state but `update`. In a `shard_map`, the magnitudes are those of all devices, unless
    `check_vma=False` hides from JAX what differs between them.

    Args:
      fun: a function under `jaxmp.autocast` with a delayed recipe, or a model under such a policy.
      state: its state, from `init_state`. A history of zeros says nothing, and scales by 1.
      probes: what `probes_of` returned, to be differentiated beside the params. Their gradients
        are for `update`, and not for an optimizer; do not add those of microbatches, but take the
        largest.
      scale: by how much the loss is multiplied.

    Returns:
      A function of the same arguments that returns the result, and the magnitudes for `update`.

    Raises:
      ValueError: when it is called, if the state is that of another program.

    >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> w, x = jnp.ones((16, 32)), jnp.full((4, 16), 3.0)
    >>> policy = "mixed_bfloat16,products=delayed:history=2"
    >>> fast, state = autocast(loss_fn, policy), init_state(loss_fn, policy, w, x)
    >>> def loss(w, probes):
    ...     return with_state(fast, state, probes)(w, 2 * x)
    >>> grads, seen = jax.grad(loss, argnums=(0, 1), has_aux=True)(w, probes_of(state))
    >>> update(state, seen, grads[1]).forward[0]
    Array([6., 3.], dtype=float32)
    """
    forward, backward = expected_of(state, scale)
    given = Given(forward, backward, [None] * len(backward) if probes is None else list(probes))
    return functools.partial(with_given(fun), given)


def with_given(fun: Callable[..., Any]) -> Callable[..., tuple[Any, list[Array]]]:
    """Returns the function, with what is given for its products in float8 as a first argument."""

    @functools.wraps(fun, updated=())
    def call(given: Given, *args: Any, **kwargs: Any) -> tuple[Any, list[Array]]:
        static, arrays = partition((args, kwargs), numpy=False)
        traced = trace_call(fun, static, arrays, as_jit=True, numpy=False)
        closed = traced.closed
        _check_same_program(given, sites_of(open_jaxpr(closed).eqns))

        def run(given: Given, arrays: list[Any]) -> list[Any]:
            made, seen = run_with_scales(closed.jaxpr, closed.consts, arrays, given)
            return [*made, *seen]

        specs = (*traced.axes.specs, *[jax.P()] * len(given.forward))
        made = traced.axes._replace(specs=specs).run(run, [given, arrays])
        count = len(closed.jaxpr.outvars)
        return combine(traced.returned, made[:count]), made[count:]

    return call


def _check_same_program(given: Given, sites: Float8Sites) -> None:
    """Raises ValueError if a state is that of another program."""
    fits = all(
        len(arrays) == len(places)
        and all(x is None or x.shape == y.stack for x, y in zip(arrays, places, strict=True))
        for arrays, places in zip(given, (*sites, sites.backward), strict=True)
    )
    if not fits:
        wanted = f"{len(sites.forward)} operands and {len(sites.backward)} cotangents"
        stored = f"{len(given.forward)} and {len(given.backward)}"
        raise ValueError(
            f"the float8 state is that of another program: the products here round {wanted}, the "
            f"state has {stored}, or layers in another number. Make it anew: {_HOW}"
        )


def check_has_state(policies: Iterable[Policy], collections: Mapping[str, Any]) -> None:
    """Raises ValueError if a policy is delayed and no collection holds the state."""
    recipes = [policy.products for policy in policies]
    if FLOAT8_STATE not in collections and any(x is not None and x.is_delayed for x in recipes):
        raise ValueError(
            "the policy scales float8 products by the magnitudes of earlier steps, and the train "
            f"state does not hold them. Give TrainState.create {_HOW}"
        )
    if FLOAT8_STATE in collections and not isinstance(collections[FLOAT8_STATE], Float8State):
        raise TypeError(
            f"the collection {FLOAT8_STATE!r} must be a jaxmp.float8.Float8State, got a "
            f"{type(collections[FLOAT8_STATE]).__name__}. Give TrainState.create {_HOW}"
        )


class Delayed(NamedTuple):
    """What a train step does with the collection that holds the state, if there is one.

    Attributes:
      state: the state, or None.
      others: the other collections, which the loss function is called with.
      arguments: two further arguments for the loss: what to expect, and the probes.
      scale: the loss scale. The weight of a microbatch is no part of it: the cotangents of its
        weighted loss are as large as those of the whole batch.
      parts: the number of microbatches.
    """

    state: Float8State | None
    others: dict[str, PyTree]
    arguments: tuple[Any, ...] = ()
    scale: Any = 1.0
    parts: int = 1

    @classmethod
    def of(cls, collections: Mapping[str, PyTree], options: GradientOptions) -> "Delayed":
        """Returns what follows from the collections of a train state and the options of a step."""
        others = {name: x for name, x in collections.items() if name != FLOAT8_STATE}
        if len(others) == len(collections):
            return cls(None, others)
        state = collections[FLOAT8_STATE]
        scale = 1.0 if options.loss_scale is None else options.loss_scale.scale
        arguments = (expected_of(state, scale), probes_of(state))
        return cls(state, others, arguments, scale, options.microbatches)

    @property
    def beside(self) -> tuple[int, ...]:
        """The positions of the probes, which are differentiated beside the params."""
        return (4,) if self.arguments else ()

    def unpacked(self, found: Any) -> tuple[Any, Any, Any]:
        """Returns what an evaluation found: collections, `aux`, and magnitudes for `updated`."""
        if not self.beside:
            return found[0], found[1], ()
        (new, aux, forward), backward = found
        return new, aux, (forward, backward)

    def updated(self, found: Sequence[list[Any]]) -> dict[str, Float8State]:
        """Returns the collection after a step that found these magnitudes, stacked over parts."""
        if self.state is None:
            return {}
        several = self.parts > 1
        forward, backward = ([jnp.max(x, 0) if several else x for x in each] for each in found)
        return {FLOAT8_STATE: update(self.state, forward, backward, scale=self.scale)}
