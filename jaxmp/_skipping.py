"""How an optimizer step is taken or skipped, without a second copy of the state.

Where `lax.cond` hands the state through, the GPU compiler of jax 0.10 makes a second state, and
gathers a sharded one on every device. A loop of at most one trip does the same as the branch, and
its carry is written in place, sharded as it came. CPUs and TPUs are better served by the branch:
the compiler of the latter computes and stores before a loop what depends on gradients alone.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmp import _compat
from jaxmp._tree import select

Skip = Literal["auto", "cond", "select", "none"]
State = TypeVar("State")


def step_if(
    taken: Bool[Array, ""], step: Callable[[State], State], before: State, skip: Skip
) -> State:
    """The state after a step if it is to be taken, and otherwise every bit as before.

    Args:
      taken: a boolean scalar.
      step: makes the next state of one, in the same structure and dtypes.
      before: the state.
      skip: how a step is skipped; `"none"` takes it whatever `taken` says.

    Returns:
      The state after it.

    >>> step_if(jnp.array(False), lambda x: x + jnp.nan, jnp.ones(2), "cond")
    Array([1., 1.], dtype=float32)
    """

    def branch() -> State:
        return jax.lax.cond(taken, step, lambda state: state, before)

    def loop() -> State:
        return at_most_once(taken, step, before)

    def choice() -> State:
        return select(taken, step(before), before)

    if skip == "none":
        return step(before)
    if not _compat.is_traced(taken):  # without `jit` a branch would be compiled at each call
        return step(before) if taken else before
    if skip == "cond":
        return jax.lax.platform_dependent(cpu=branch, tpu=branch, default=loop)
    if skip == "select":
        return choice()
    return jax.lax.platform_dependent(cpu=branch, tpu=branch, default=choice)


def at_most_once(taken: Bool[Array, ""], step: Callable[[State], State], before: State) -> State:
    """A loop of one trip if the step is taken, and of none if it is not.

    The step keeps structure and dtypes, as that of `step_if`.

    >>> at_most_once(jnp.array(True), lambda x: x + 1, jnp.zeros(2))
    Array([1., 1.], dtype=float32)
    """
    # A loop has no reverse mode. To have it, as a branch has, what is differentiated must be an
    # argument, also what the step closes over.
    closed_step, closed_over = jax.closure_convert(step, before)

    @jax.custom_jvp
    def loop(taken: Any, before: State, *closed_over: Any) -> State:
        trips = taken.astype(jnp.int32)
        return jax.lax.fori_loop(0, trips, lambda _, now: closed_step(now, *closed_over), before)

    def branch(taken: Any, before: State, *closed_over: Any) -> State:
        return jax.lax.cond(taken, closed_step, lambda now, *_: now, before, *closed_over)

    loop.defjvp(lambda primals, tangents: jax.jvp(branch, primals, tangents))
    return loop(taken, before, *closed_over)
