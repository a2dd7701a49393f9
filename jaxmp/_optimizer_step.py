"""One step of the optimizer, taken or skipped, over params, masters and inner state."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int32, PyTree

from jaxmp._cpu_compiler import warn_of_cpu_compiler
from jaxmp._dtypes import DType, at_least_float32, is_inexact, is_narrow
from jaxmp._frozen import moved_by
from jaxmp._loss_scale import LossScale, LossScaleState
from jaxmp._masters import MasterStorage
from jaxmp._placement import placed_beside
from jaxmp._rounding import widen_rounded
from jaxmp._skipping import Skip, step_if
from jaxmp._tree import (
    all_finite,
    check_arrays,
    check_flag,
    check_like,
    leaf_names,
    same_structure,
    strong,
    widen,
)


class MixedPrecisionState(NamedTuple):
    """The state of `mixed_precision`: a pytree of arrays.

    Attributes:
      inner: the state of the wrapped optimizer, in float32.
      master: what is kept beside the live params; `optax.MaskedNode()` for float32 params,
        which are their own masters.
      loss_scale: the scale with which the next loss is to be scaled.
      grads_finite: whether the last step was taken: its gradients were finite, and so was what
        else it was made to depend on. Always true with `skip="none"`, which does not look.
      skipped: how many steps were skipped so far.
      consecutive_skips: how many of them since the last step that was taken.
    """

    inner: Any
    master: PyTree
    loss_scale: LossScaleState
    grads_finite: Bool[Array, ""]
    skipped: Int32[Array, ""]
    consecutive_skips: Int32[Array, ""]


class _Stepped(NamedTuple):
    """What a step changes: params (or what updates are made of), masters, inner state."""

    output: PyTree
    master: PyTree
    inner: Any


@dataclasses.dataclass(frozen=True, eq=False)  # hashable, whatever config the user has written
class Algorithm:
    """What `mixed_precision` was told: the optimizer inside, and how it is kept and skipped.

    Attributes:
      inner: the optimizer, which sees float32 alone.
      loss_scale: the config of the loss scale.
      storage: how masters are kept.
      skip: how a step is skipped.
      computed_in: the dtypes that the policies compute in.
    """

    inner: optax.GradientTransformationExtraArgs
    loss_scale: LossScale
    storage: MasterStorage
    skip: Skip
    computed_in: frozenset[DType]

    def init(self, params: PyTree, values: PyTree) -> MixedPrecisionState:
        """The first state for live params whose masters begin as `values`."""
        check_arrays(params, "params")
        params, values = strong(params), strong(values)
        moved = moved_by(self.inner, params)
        _check_moved(params, moved)
        master = self.storage.init(params, values, moved)
        state = MixedPrecisionState(
            inner=strong(self.inner.init(self.storage.load(params, master))),
            master=master,
            loss_scale=self.loss_scale.init(),
            grads_finite=jnp.array(True),
            skipped=jnp.int32(0),
            consecutive_skips=jnp.int32(0),
        )
        state = placed_beside(params, state)
        warn_of_cpu_compiler(self.computed_in, state)
        return state

    def step(
        self,
        grads: PyTree,
        state: MixedPrecisionState,
        params: PyTree,
        finite: Bool[Array, ""] | None,
        extra: dict[str, Any],
        *,
        as_updates: bool,
    ) -> tuple[PyTree, MixedPrecisionState]:
        """The new params, or the updates that lead to them, and the new state.

        Args:
          grads: unscaled gradients.
          state: the state.
          params: the live params.
          finite: whether the step is taken, in place of a look at the gradients.
          extra: further arguments of the inner optimizer.
          as_updates: whether updates are wanted.
        """
        self._check(grads, state, params)
        params = strong(params)
        grads = jax.tree.map(_wide_gradient, strong(grads), params)

        def take(now: _Stepped) -> _Stepped:
            # New params are written over the ones that are read here: others would be copied.
            old = params if as_updates else now.output
            values = self.storage.load(old, now.master)
            updates, inner = self.inner.update(grads, now.inner, values, **extra)
            new = self.storage.store(optax.apply_updates(values, updates), old, now.master)
            output = _ingredients(old, new.params, updates) if as_updates else new.params
            return _Stepped(output, new.master, _like_before(inner, now.inner))

        if self.skip == "none":
            finite = jnp.array(True)
        else:
            finite = all_finite(grads) if finite is None else finite
            check_flag(finite, "finite")
            finite = jnp.asarray(finite)
            _check_agreed(finite, state)
        output = _no_ingredients(params) if as_updates else params
        after = step_if(finite, take, _Stepped(output, state.master, state.inner), self.skip)
        output = _updates(params, after.output, finite) if as_updates else after.output
        counts = self._counted(state, finite)
        return output, counts._replace(inner=after.inner, master=after.master)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def _counted(self, state: MixedPrecisionState, finite: Bool[Array, ""]) -> MixedPrecisionState:
        """The loss scale and the counts after a step."""
        return state._replace(
            loss_scale=self.loss_scale.adjust(state.loss_scale, finite),
            grads_finite=finite,
            skipped=state.skipped + (~finite).astype(jnp.int32),
            consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
        )

    def _check(self, grads: PyTree, state: MixedPrecisionState, params: PyTree) -> None:
        if params is None:
            raise ValueError(
                "mixed_precision needs the params to update: call tx.update(grads, state, params)"
            )
        if not isinstance(state, MixedPrecisionState):
            raise TypeError(
                f"the state must be the MixedPrecisionState that tx.init returned, got "
                f"{type(state).__name__}"
            )
        check_like(
            grads,
            params,
            name="gradients",
            like_name="params",
            advice="Differentiate with respect to the params that the optimizer updates.",
        )
        _check_gradients(grads, params)
        leaves, treedef = jax.tree.flatten(params)
        expected = _masters_of(self, treedef, tuple((jnp.shape(x), _dtype(x)) for x in leaves))
        if not same_structure(expected, state.master) or any(
            a.dtype != b.dtype or a.shape != b.shape
            for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(state.master), strict=True)
        ):
            raise ValueError(
                "the params do not match the optimizer state: their structure, shapes or dtypes "
                f"are not those that tx.init saw. Masters now: {_summary(state.master)}; these "
                f"params want: {_summary(expected)}. Cast params before tx.init (or let "
                "tx.init_params do it) and keep their dtypes; a state that was saved under another "
                "policy has other masters"
            )


@functools.lru_cache(maxsize=64)
def _masters_of(algorithm: Algorithm, treedef: Any, kinds: tuple[Any, ...]) -> PyTree:
    """What is kept beside params of these shapes and dtypes. Without `jit` each step asks."""
    params = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    moved = moved_by(algorithm.inner, params)
    return jax.eval_shape(lambda p: algorithm.storage.init(p, p, moved), params)


def _dtype(x: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.result_type(x))


def _check_moved(params: PyTree, moved: PyTree) -> None:
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True)
    for i, (x, moves) in enumerate(leaves):
        if moves and not is_inexact(x):
            raise TypeError(
                f"params, leaf {leaf_names(params)[i]!r}, is {x.dtype}, and the optimizer moves "
                "it: only floating leaves have gradients and masters. Freeze it (optax."
                "multi_transform with optax.set_to_zero), convert it to a float, or keep counters, "
                "keys and tables of integers in another argument"
            )


def _check_gradients(grads: PyTree, params: PyTree) -> None:
    for i, (g, p) in enumerate(zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)):
        given = jnp.result_type(g)
        if jnp.issubdtype(given, jnp.complexfloating) and not jnp.iscomplexobj(p):
            raise TypeError(
                f"gradients leaf {leaf_names(grads)[i]!r} is complex, but its param is real"
            )
        if is_inexact(p) and not jnp.issubdtype(given, jnp.inexact):
            raise TypeError(
                f"gradients, leaf {leaf_names(grads)[i]!r}, is {given}, but its param is {p.dtype}"
            )


def _wide_gradient(grad: Any, param: Any) -> Any:
    """A gradient in float32 or wider; for a frozen table of integers, a zero of its dtype."""
    if not is_inexact(param):
        return jnp.zeros_like(param)
    return jnp.asarray(grad, at_least_float32(param.dtype))


# For a narrow param a step yields the new param rather than its update: the update is the
# difference of two rounded params.
def _ingredients(params: PyTree, new_params: PyTree, updates: PyTree) -> PyTree:
    return jax.tree.map(
        lambda p, new, u: new if is_narrow(p.dtype) else jnp.asarray(u, p.dtype),
        params,
        new_params,
        updates,
    )


@functools.partial(jax.jit, inline=True)
def _no_ingredients(params: PyTree) -> PyTree:
    # Minus zero, as x + -0.0 is x for every x, while -0.0 + 0.0 is +0.0.
    def nothing(param: Any) -> Any:
        zero = complex(-0.0, -0.0) if jnp.iscomplexobj(param) else -0.0
        return jnp.full_like(param, zero if is_inexact(param) else 0)

    return jax.tree.map(nothing, params)


def _check_agreed(finite: Bool[Array, ""], state: MixedPrecisionState) -> None:
    """In a `shard_map`: one decision for all devices that share the counts of the state."""
    apart = jax.typeof(finite).mat.varying - jax.typeof(state.skipped).mat.varying
    if apart:
        axes = ", ".join(map(repr, sorted(apart)))
        raise ValueError(
            f"whether to take the step differs between the devices of mesh axis {axes}, each of "
            "which knows only its own gradients: some would skip a step that others take. Give "
            "finite=jaxmp.sharding.all_finite(grads), on which all agree; or, if each trains a "
            "model of its own, a state that varies: jax.lax.pcast(state, axis, to='varying')"
        )


@functools.partial(jax.jit, inline=True)
def _updates(params: PyTree, ingredients: PyTree, finite: Bool[Array, ""]) -> PyTree:
    def update(p: Any, x: Any) -> Any:
        if not is_narrow(p.dtype):
            return x
        return jnp.where(finite, widen_rounded(x) - widen(p), -0.0)

    return jax.tree.map(update, params, ingredients)


def _like_before(inner: Any, before: Any) -> Any:
    """The inner state with strong types; an error if the optimizer changed a dtype or a shape."""
    inner = strong(inner)
    check_like(
        inner,
        before,
        name="the new state of the inner optimizer",
        like_name="the old one",
        advice="An optimizer must keep the structure of its state; this one does not.",
    )
    leaves = zip(jax.tree.leaves(inner), jax.tree.leaves(before), strict=True)
    for i, (new, old) in enumerate(leaves):
        if jnp.result_type(new) != jnp.result_type(old):
            raise TypeError(
                f"the inner optimizer changed the dtype of its state {leaf_names(inner)[i]!r} from "
                f"{jnp.result_type(old)} to {jnp.result_type(new)}"
            )
    return inner


def _summary(tree: PyTree) -> str:
    leaves = list(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
    shown = [f"{name} {x.dtype}{list(x.shape)}" for name, x in leaves[:4]]
    return ", ".join(shown + ["..."] * (len(leaves) > 4)) or "none"
