"""Takes or skips an optimizer step, without a second copy of the state."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmp._numerics.tree import select
from jaxmp._program import compat

Skip = Literal["auto", "cond", "select", "none"]
State = TypeVar("State")


def step_if(
    pred: Bool[Array, ""], step: Callable[[State], State], before: State, skip: Skip
) -> State:
    """Returns the state after a step if it is taken, and otherwise the old state to the bit.

    The step keeps structure and dtypes. `skip` is that of `mixed_precision`.

    >>> step_if(jnp.array(False), lambda x: x + jnp.nan, jnp.ones(2), "cond")
    Array([1., 1.], dtype=float32)
    """

    def branch() -> State:
        return jax.lax.cond(pred, step, lambda state: state, before)

    def loop() -> State:
        return at_most_once(pred, step, before)

    def choice() -> State:
        return select(pred, step(before), before)

    if skip == "none":
        return step(before)
    # Compiled at each call, a branch took 200 times as long as a step of optax.
    if not compat.is_traced(pred):  # without `jit` a branch would be compiled at each call
        return step(before) if pred else before
    # Where `lax.cond` passes the state through, the GPU compiler of jax 0.10 makes a second state,
    # and gathers a sharded state on every device. A loop of at most one iteration does the same as
    # the branch; its carry is written in place, and stays sharded. On CPUs and TPUs the branch is
    # better: a TPU's compiler computes everything that depends only on gradients before a loop, and
    # stores it.
    if skip == "select":
        return choice()
    step = jax.jit(step)  # traced once for all branches; compilers inline it
    if skip == "cond":
        return jax.lax.platform_dependent(cpu=branch, tpu=branch, default=loop)
    # GPU compilers fuse the choice into the update. On TPUs it takes 4 bytes for each param that
    # has a master.
    return jax.lax.platform_dependent(cpu=branch, tpu=branch, default=choice)


def at_most_once(pred: Bool[Array, ""], step: Callable[[State], State], before: State) -> State:
    """Runs the step in a loop of one iteration, or of none if it is not taken.

    The step keeps structure and dtypes, as in `step_if`.

    >>> at_most_once(jnp.array(True), lambda x: x + 1, jnp.zeros(2))
    Array([1., 1.], dtype=float32)
    """
    # A loop has no reverse mode, but a branch has, and supplies it here. For this, all that is
    # differentiated must be an argument, also values that the step closes over.
    closed_step, closed_over = jax.closure_convert(step, before)

    @jax.custom_jvp
    def loop(pred: Any, before: State, *closed_over: Any) -> State:
        trips = pred.astype(jnp.int32)
        return jax.lax.fori_loop(0, trips, lambda _, now: closed_step(now, *closed_over), before)

    def branch(pred: Any, before: State, *closed_over: Any) -> State:
        return jax.lax.cond(pred, closed_step, lambda now, *_: now, before, *closed_over)

    loop.defjvp(lambda primals, tangents: jax.jvp(branch, primals, tangents))
    return loop(pred, before, *closed_over)
