"""One step of the optimizer, taken or skipped, over params, masters and inner state."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int32, PyTree

from jaxmp._numerics.dtypes import DType, is_inexact, is_narrow
from jaxmp._numerics.loss_scale import DynamicLossScale, LossScale, LossScaleState
from jaxmp._numerics.rounding import widen_rounded
from jaxmp._numerics.tree import (
    all_finite,
    all_zero,
    check_arrays,
    check_flag,
    check_like,
    copied,
    leaf_names,
    strong,
    widen,
)
from jaxmp._program.cpu_compiler import warn_of_cpu_compiler
from jaxmp._program.explicit_axes import Axes
from jaxmp._program.mesh_axes import explicit_mesh, on_current_axes
from jaxmp._training.compact_forms import expanded_state, store_next
from jaxmp._training.compact_state import Moments, compact_tree, warn_of_coded_params
from jaxmp._training.first_state import in_one_program
from jaxmp._training.frozen import params_of, trainable_leaves, updated
from jaxmp._training.master_storages import same_bits
from jaxmp._training.masters import Masters, is_masked
from jaxmp._training.optimizer_checks import (
    check_gradients,
    check_same_params,
    check_trainable,
    first_difference,
)
from jaxmp._training.skipping import Skip, step_if


class MixedPrecisionState(NamedTuple):
    """The state of `mixed_precision`: a pytree of arrays.

    Attributes:
      inner: the state of the wrapped optimizer, in float32 or as `compact_state` stores it.
      master: what is stored with the live params; `optax.MaskedNode()` for float32 params, which
        are their own masters.
      loss_scale: the scale for the next loss.
      grads_finite: whether the last step was taken: its gradients were finite, and so was
        everything else that was tested. Always true with `skip="none"`, which tests nothing.
      skipped: how many steps were skipped so far.
      consecutive_skips: how many steps were skipped since the last step that was taken.
      zero_gradients: how many steps went by in which every number of the gradients was zero; -1
        from the first step on that had others. Counted under a dynamic loss scale alone, and not in
        a `shard_map` whose devices have each its gradients.
      kind: how many steps were taken, for random rounding, under a name that says how params and
        masters are stored, such as `bfloat16-remainder`. Checkpoints are restored by name, and
        arrays of another dtype are silently cast; but a checkpoint of another kind lacks this name.
    """

    inner: Any
    master: PyTree
    loss_scale: LossScaleState
    grads_finite: Bool[Array, ""]
    skipped: Int32[Array, ""]
    consecutive_skips: Int32[Array, ""]
    zero_gradients: Int32[Array, ""]
    kind: Any


class _StepParts(NamedTuple):
    """The values that a step changes: params (or ingredients of updates), masters, inner state."""

    output: PyTree
    master: PyTree
    inner: Any


class _Expected(NamedTuple):
    """The state that params determine: which of them train, masters, the inner state if known."""

    trainable: PyTree
    master: PyTree
    inner: Any


@dataclasses.dataclass(frozen=True, eq=False)  # hashable, whatever config the user has written
class Algorithm:
    """The arguments of `mixed_precision`: the inner optimizer, its storage and its skips.

    Attributes:
      inner: the optimizer, which sees only float32.
      moments: the dtype in which its state is stored.
      loss_scale: the config of the loss scale.
      masters: how masters are stored.
      skip: how a step is skipped.
      computed_in: the dtypes that the policies compute in.
    """

    inner: optax.GradientTransformationExtraArgs
    moments: Moments
    loss_scale: LossScale
    masters: Masters
    skip: Skip
    computed_in: frozenset[DType]
    _expected_states: dict[Any, _Expected] = dataclasses.field(default_factory=dict, repr=False)

    def init(
        self, values: PyTree, like: PyTree = None, *, own: bool = False
    ) -> tuple[PyTree, MixedPrecisionState]:
        """Returns live params, in the dtypes of `like`, and the state, for masters like `values`.

        If `own`, all are copies. Otherwise params that need no cast, and masters, are the values.
        """
        check_arrays(values, "params")
        values = strong(values)
        live = jax.tree.map(
            lambda x, y: jax.ShapeDtypeStruct(x.shape, y.dtype),
            values,
            values if like is None else strong(like),
        )
        trainable, master, _ = self._expected(live, anew=True)
        check_trainable(values, trainable)
        warn_of_coded_params(
            self.inner, jax.eval_shape(self.masters.load, live, master), self.moments
        )
        dtypes = jax.tree.map(lambda x: x.dtype, live)
        first = functools.partial(self._first, dtypes, trainable, own)
        params, state = in_one_program(first, values)
        warn_of_cpu_compiler(self.computed_in, state)
        return params, state

    def _first(
        self, dtypes: PyTree, trainable: PyTree, own: bool, values: PyTree
    ) -> tuple[PyTree, MixedPrecisionState]:
        params, master = self.masters.first(values, dtypes, trainable)
        # Weakly typed leaves, such as Python scalars, would trace the second step anew.
        state = MixedPrecisionState(
            inner=strong(self._first_inner(params, master)),
            master=master,
            loss_scale=self.loss_scale.init(),
            grads_finite=jnp.array(True),
            skipped=jnp.int32(0),
            consecutive_skips=jnp.int32(0),
            zero_gradients=jnp.int32(0),
            kind=self.masters.kind(params),
        )
        return copied((params, state)) if own else (params, state)

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
        """Returns the new params, or the updates that lead to them, and the new state.

        `finite` says whether to take the step, in place of a test of the gradients; `extra` are
        further arguments of the inner optimizer.
        """
        trainable = self._check(grads, state, params)
        # Optimizers were written for automatic axes. A step runs on these, and keeps all shardings.
        mesh = explicit_mesh(jax.tree.leaves((params, state)))
        if mesh is None:
            return self._step(grads, state, params, finite, extra, trainable, as_updates)
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (params, state))

        def stepped(grads: PyTree, state: MixedPrecisionState, params: PyTree) -> list[Any]:
            test, more = jax.tree.map(on_current_axes, (finite, extra))
            return list(self._step(grads, state, params, test, more, trainable, as_updates))

        output, after = Axes(mesh, specs).run(stepped, [grads, state, params])
        return output, after

    def _step(
        self,
        grads: PyTree,
        state: MixedPrecisionState,
        params: PyTree,
        finite: Bool[Array, ""] | None,
        extra: dict[str, Any],
        trainable: PyTree,
        as_updates: bool,
    ) -> tuple[PyTree, MixedPrecisionState]:
        """Does what `step` does, on automatic mesh axes; only the `trainable` params change."""
        params, grads = strong(params), strong(grads)

        def take(now: _StepParts) -> _StepParts:
            # Read the params that the new params overwrite: others would be copied.
            old = params if as_updates else now.output
            values = self.masters.load(old, now.master)
            before = now.inner if self.moments == "float32" else expanded_state(now.inner)
            updates, inner = updated(self.inner, grads, (before, values), extra, trainable)
            inner = _check_next_state(inner, before)
            # A frozen param keeps every bit, also of minus zero and of the infinities in a mask.
            add = optax.apply_updates
            values = jax.tree.map(lambda v, u, t: add(v, u) if t else v, values, updates, trainable)
            new = self.masters.store(values, old, now.master, jax.tree.leaves(state.kind)[0])
            output = jax.tree.map(lambda o, n, t: n if t else o, old, new.params, trainable)
            output = _ingredients(old, output, updates, trainable) if as_updates else output
            if self.moments != "float32":
                inner = store_next(now.inner, inner, _barrier_operands(new.params, new.master))
            return _StepParts(output, new.master, inner)

        # Zero in all steps: somebody forgot a dynamic loss scale. In a `shard_map`, who says which
        # steps to take may have gradients of one device only, which are not counted. Nobody forgets
        # a scale in bfloat16, and there the test would cost a pass over the gradients.
        alike = finite is None or not jax.sharding.get_abstract_mesh().manual_axes
        counts_zeros = alike and isinstance(self.loss_scale, DynamicLossScale)
        zero = all_zero(grads) if counts_zeros else jnp.array(False)
        if self.skip == "none":
            finite = jnp.array(True)
        else:
            finite = all_finite(grads) if finite is None else finite
            check_flag(finite, "finite")
            finite = jnp.asarray(finite)
            _check_agreement(finite, state)
        output = _no_ingredients(params) if as_updates else params
        after = step_if(finite, take, _StepParts(output, state.master, state.inner), self.skip)
        output = _updates(params, after.output, finite) if as_updates else after.output
        count: Callable[..., MixedPrecisionState] = _jitted_next_counts
        try:
            hash(self.loss_scale)
        except TypeError:  # a user's class, which cannot be a static argument
            count = _next_counts
        counts = count(self.loss_scale, state, finite, zero)
        return output, counts._replace(inner=after.inner, master=after.master)

    def _first_inner(self, params: PyTree, master: PyTree) -> Any:
        return compact_tree(self.inner.init(self.masters.load(params, master)), self.moments)

    def _expected(self, params: PyTree, *, anew: bool = False) -> _Expected:
        """Returns the parts of a state that params like these determine."""
        leaves, treedef = jax.tree.flatten(params)
        canonical = jax.dtypes.canonicalize_dtype
        kinds = tuple((jnp.shape(x), canonical(jnp.result_type(x))) for x in leaves)
        # Each step needs them, and outside of `jit` would trace the optimizer for them.
        if anew or (treedef, kinds) not in self._expected_states:
            like = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
            trainable = trainable_leaves(self.inner, like)
            dtypes = jax.tree.unflatten(treedef, [kind[1] for kind in kinds])
            live, master = jax.eval_shape(lambda p: self.masters.first(p, dtypes, trainable), like)
            inner = None
            with contextlib.suppress(Exception):  # any exception: the optimizer is the user's
                inner = jax.eval_shape(self._first_inner, live, master)
            self._expected_states[treedef, kinds] = _Expected(trainable, master, inner)
        return self._expected_states[treedef, kinds]

    def _check(self, grads: PyTree, state: MixedPrecisionState, params: PyTree) -> PyTree:
        """Raises if the arguments do not fit together; returns which params are trainable."""
        if params is None:
            raise ValueError(
                "mixed_precision needs the params to update: call tx.update(grads, state, params)"
            )
        if not isinstance(state, MixedPrecisionState):
            raise TypeError(
                "the state must be the MixedPrecisionState that tx.init returned, got "
                + (_NOT_RESTORED if state is None else type(state).__name__)
            )
        check_gradients(grads, params_of(grads, params))
        trainable, master, inner = self._expected(params)
        check_same_params(params, state.master)
        if difference := first_difference(state.master, master):
            raise ValueError(
                "the params do not match the optimizer state: their structure, shapes or dtypes "
                f"are not those that tx.init saw. Masters now: {difference}. Cast params before "
                "tx.init (or let tx.init_params do it) and keep their dtypes, as "
                "optax.apply_updates does, and equinox.apply_updates does not. A state that was "
                "saved under another policy, or with another master=..., becomes one of this "
                "optimizer by jaxmp.storage.convert_state(state, tx). Where other params were "
                "frozen before, make the masters anew: "
                "state._replace(master=tx.init(params).master)"
            )
        if inner is not None and (difference := first_difference(state.inner, inner)):
            raise ValueError(
                "the state is that of another optimizer, or its moments are stored otherwise: "
                f"{difference}. If only moments=... differs, convert it: "
                "jaxmp.storage.convert_state(state, tx)"
            )
        return trainable


def _next_counts(
    loss_scale: LossScale,
    state: MixedPrecisionState,
    finite: Bool[Array, ""],
    zero: Bool[Array, ""],
) -> MixedPrecisionState:
    """Returns the state with the loss scale and the counts after a step."""
    return state._replace(
        loss_scale=loss_scale.adjust(state.loss_scale, finite),
        grads_finite=finite,
        skipped=state.skipped + (~finite).astype(jnp.int32),
        consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
        zero_gradients=jnp.where(
            finite,
            jnp.where(zero & (state.zero_gradients >= 0), state.zero_gradients + 1, -1),
            state.zero_gradients,
        ),
        kind=jax.tree.map(lambda steps: steps + finite.astype(jnp.int32), state.kind),
    )


# Outside of `jit`, this is one compiled call, and not one for each operation.
_jitted_next_counts = jax.jit(_next_counts, static_argnums=0, inline=True)


def _barrier_operands(params: PyTree, master: PyTree) -> list[Any]:
    """Returns for each param an array made in the same pass: its master, or else the param."""
    # One of the two, as the TPU compiler makes both at once only if just one is waited for.
    masters = jax.tree.leaves(master, is_leaf=is_masked)
    pairs = zip(jax.tree.leaves(params), masters, strict=True)
    return [p if is_masked(m) or m.shape != p.shape else m for p, m in pairs]


# For a narrow param a step yields the new param rather than its update: the update is the
# difference of two rounded params.
def _ingredients(params: PyTree, new_params: PyTree, updates: PyTree, trainable: PyTree) -> PyTree:
    def ingredient(p: Any, new: Any, u: Any, is_trainable: bool) -> Any:
        if is_narrow(p.dtype):
            return new
        return jnp.asarray(u, p.dtype) if is_trainable else _zero_ingredient(p)

    return jax.tree.map(ingredient, params, new_params, updates, trainable)


@functools.partial(jax.jit, inline=True)
def _no_ingredients(params: PyTree) -> PyTree:
    return jax.tree.map(_zero_ingredient, params)


def _zero_ingredient(param: Any) -> Any:
    # Minus zero, as x + -0.0 is x for every x, while -0.0 + 0.0 is +0.0.
    zero = complex(-0.0, -0.0) if jnp.iscomplexobj(param) else -0.0
    return jnp.full_like(param, zero if is_inexact(param) else 0)


_NOT_RESTORED = (
    "None: the program around restored no state, perhaps since params were loaded in other dtypes "
    "than they were saved in. Load them as they were, or begin anew with tx.init(params)"
)


def _check_agreement(finite: Bool[Array, ""], state: MixedPrecisionState) -> None:
    """Raises in a `shard_map` if devices that share the counts of the state decide separately."""
    apart = jax.typeof(finite).mat.varying - jax.typeof(state.skipped).mat.varying
    if apart:
        axes = ", ".join(map(repr, sorted(apart)))
        raise ValueError(
            f"whether to take the step differs between the devices of mesh axis {axes}, each of "
            "which knows only its own gradients: some would skip a step that others take. Give "
            "finite=jax.lax.pmin(jaxmp.numbers.all_finite(grads), axis), on which all agree; or, "
            "if each trains a model of its own, a state that varies: jax.lax.pcast(state, axis, "
            "to='varying')"
        )


@functools.partial(jax.jit, inline=True)
def _updates(params: PyTree, ingredients: PyTree, finite: Bool[Array, ""]) -> PyTree:
    def update(p: Any, x: Any) -> Any:
        if not is_narrow(p.dtype):
            return x
        # The difference of infinite params is NaN, also where nothing changes.
        return jnp.where(finite & ~same_bits(x, p), widen_rounded(x) - widen(p), -0.0)

    return jax.tree.map(update, params, ingredients)


def _check_next_state(inner: Any, before: Any) -> Any:
    """Returns the inner state with strong types; raises if a dtype or a shape changed."""
    inner = strong(inner)
    check_like(
        inner,
        before,
        name="the new state of the inner optimizer",
        like_name="the old one",
        advice="An optimizer must keep the structure of its state. Either this one does not, or "
        "the state that it was given is not one that tx.init made.",
    )
    # A branch and a loop need equal types. This error names the leaf and the optimizer.
    leaves = zip(jax.tree.leaves(inner), jax.tree.leaves(before), strict=True)
    for i, (new, old) in enumerate(leaves):
        if jnp.result_type(new) != jnp.result_type(old):
            raise TypeError(
                f"the inner optimizer changed the dtype of its state {leaf_names(inner)[i]!r} from "
                f"{jnp.result_type(old)} to {jnp.result_type(new)}"
            )
    return inner
