"""A jitted train step that checks the state it is called with."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from jaxmp._numerics.tree import copied, is_from
from jaxmp._program import compat
from jaxmp._training.progress import warn_of_foreign_scale
from jaxmp._training.step_metrics import Metrics
from jaxmp._training.train_state import TrainState


class TrainStep:
    """A jitted step that checks the state it is called with, as `make_train_step` returns it.

    It has all attributes of a jitted function, such as `lower` and `trace`. `warn` is called with
    the state and the batch of the first call.
    """

    def __init__(
        self,
        jitted: jax.stages.Wrapped,
        *,
        donates: bool,
        warn: Callable[[TrainState, PyTree], None] | None = None,
    ) -> None:
        self._jitted = jitted
        self._donates = donates
        self._warn = warn
        self._called = False
        # The state that was returned last, whose arrays are known to be apart, and their types.
        self._latest: Callable[[], TrainState | None] = _no_state
        self._types: set[Any] = set()

    def __call__(
        self, state: TrainState, batch: PyTree, *others: Any
    ) -> tuple[TrainState, Metrics]:
        """Runs one step; see `make_train_step`."""
        if others:
            check_state(state, batch)
            raise_for_several_batches(others, "(state, (x, y))", "(params, batch)")
        # A look at each array took a third of the time of a step of 100 small params. So it is
        # taken at states that come from elsewhere, and where JAX refuses the call.
        is_known = state is self._latest()
        if not is_known:
            check_state(state, batch)
        try:
            if not is_known and not compat.is_traced(state.step):
                if not self._called and not _is_deleted(state):
                    warn_of_foreign_scale(state)
                    if self._warn:
                        self._warn(state, batch)
                    self._called = True
                state = self._with_own_arrays(state, batch)
            elif is_known and not self._types.isdisjoint(_array_types(batch)):
                state = self._with_own_arrays(state, batch)
            new, metrics = self._jitted(state, batch)
        except (TypeError, ValueError, RuntimeError) as error:
            # Someone may have written into a dictionary of the state that was returned.
            own = self._with_own_arrays(state, batch) if _is_refused_donation(error) else state
            if own is state:
                _explain(error, state)
                raise
            new, metrics = self._jitted(own, batch)
        if not is_known:
            self._types = _array_types(new)
        self._latest = weakref.ref(new)
        return new, metrics

    def _with_own_arrays(self, state: TrainState, batch: PyTree) -> TrainState:
        """Copies what would be donated twice: arrays at two places of a state, or in the batch."""
        if not self._donates:
            return state
        # A hard update puts one array at two places of a state, and JAX refuses to donate it twice.
        leaves, structure = jax.tree.flatten(state)
        ids, own = set(map(id, jax.tree.leaves(batch))), list(leaves)
        for i, x in enumerate(leaves):
            if id(x) in ids and isinstance(x, jax.Array):
                own[i] = copied(x)
            ids.add(id(x))
        shared = any(x is not y for x, y in zip(leaves, own, strict=True))
        return jax.tree.unflatten(structure, own) if shared else state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_latest": _no_state}  # weak references are not pickled

    def __getattr__(self, name: str) -> Any:
        if name == "_jitted":  # of an unfinished instance, such as a copy in the making
            raise AttributeError(name)
        return getattr(self._jitted, name)


def _explain(error: Exception, state: TrainState) -> None:
    """Raises an error that says more than one of JAX does, where there is one."""
    if "deleted" in str(error) and _is_deleted(state):
        raise ValueError(
            "this state was donated to an earlier step, which wrote the next one over it. "
            "Go on with the state that the step returned, `state, metrics = step(state, "
            "batch)`, or keep old states with make_train_step(..., donate=False)"
        ) from None
    explain_refused_donation(error)


def explain_refused_donation(error: Exception) -> None:
    """Raises an error that says which arrays JAX refused to donate twice, if it did."""
    # JAX's message names neither the arrays nor a way out.
    if _is_refused_donation(error):
        raise ValueError(
            "two arrays of the state, or one of it and one of the batch, lie in the same "
            "memory, which cannot be donated twice. jax.device_put, for one, returns a new "
            "array in the old memory. Copy one of them first: jax.tree.map(jnp.copy, ...). "
            "Nothing was computed, and the state is as it was"
        ) from error


def _is_refused_donation(error: Exception) -> bool:
    return "Execute()" in str(error) and "donate" in str(error)


def _is_deleted(state: TrainState) -> bool:
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))


def _array_types(tree: PyTree) -> set[Any]:
    return {(x.shape, x.dtype) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}


def _no_state() -> None:
    """Stands for a weak reference to no state."""


def raise_for_several_batches(others: tuple[Any, ...], call: str, loss_call: str) -> None:
    raise TypeError(
        f"a step takes one batch, a tree of arrays, and got {len(others) + 1} arguments in its "
        f"place: call step{call}, whose loss function is called as loss_fn{loss_call}"
    )


def check_state(state: Any, batch: Any) -> None:
    if is_from("flax.nnx", state):
        raise TypeError(
            "this step takes a jaxmp.TrainState, got a live nnx module: make the step with "
            "jaxmp.nnx.make_train_step(loss_fn), and call it as step(model, optimizer, batch)"
        )
    if not isinstance(state, TrainState):
        kind = f"{type(state).__module__.partition('.')[0]}.{type(state).__qualname__}"
        raise TypeError(
            f"a step is called as step(state, batch) with a jaxmp.TrainState, got {kind}"
            f"{': the arguments are swapped' if isinstance(batch, TrainState) else ''}. Make one "
            "with jaxmp.TrainState.create(params=..., tx=...). Flax's TrainState takes the same "
            "tx in a step of your own: jaxmp.value_and_grad with "
            "loss_scale=state.opt_state.loss_scale, then state.apply_gradients(grads=grads)"
        )
