"""The assembled loop: a train state and a jitted step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import Array, Bool, PyTree

from jaxmp._autocast import autocast
from jaxmp._dtypes import is_floating, suggestion
from jaxmp._fsdp import FSDP
from jaxmp._grad import scaled_evaluation
from jaxmp._gradient_reduction import GradientReduction, check_fsdp, gradient_reduction
from jaxmp._loss_scale import LossScaleState
from jaxmp._microbatch import (
    Evaluation,
    check_microbatches,
    split_batch,
    sum_over_microbatches,
)
from jaxmp._optimizer import MixedPrecision
from jaxmp._placement import placed_beside
from jaxmp._policy import Policy, get_policy
from jaxmp._rules import PolicyRules
from jaxmp._tree import all_finite, cast_floating, check_like, select, stays_finite, strong
from jaxmp.rules import all_policies

Metrics = dict[str, Any]

# Names of arguments beside which collections are given by keyword.
_RESERVED = ("batch", "cast_params", "cls", "extra", "finite", "grads", "self")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "collections"],
    meta_fields=["tx"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that training carries: a pytree of arrays. Make one with `create`.

    A collection such as `batch_stats=...` is read as `state.batch_stats`. On a skipped step the
    collections stay as they were, like everything else: one overflowed batch would otherwise
    leave infinite batch statistics in the model for ever.

    Attributes:
      step: how many steps were taken (int32 scalar); skipped ones do not count.
      params: the live params.
      opt_state: the `MixedPrecisionState` of `tx`.
      collections: a dictionary of further state of the model.
      tx: the optimizer (static).
    """

    # JAX and orbax also build trees of shardings, names and None with this class, so that nothing
    # here may insist on arrays.
    step: Any
    params: PyTree
    opt_state: Any
    collections: Any
    tx: MixedPrecision

    @classmethod
    def create(
        cls, *, params: PyTree, tx: MixedPrecision, cast_params: bool = True, **collections: PyTree
    ) -> "TrainState":
        """A state at step 0.

        Args:
          params: a tree of floats, usually float32. The live params are cast to the policy's
            `param_dtype`, the masters keep these values. The state has buffers of its own, so
            that a step may be donated it while `params` stay usable.
          tx: what `mixed_precision` returned.
          cast_params: False leaves the params in the dtypes that they have, for models that
            choose the dtype of each param themselves.
          **collections: mutable state of the model by name, `batch_stats=...` or `rng=key`.

        Returns:
          The state.

        Raises:
          TypeError: if `tx` is not wrapped in `mixed_precision`, or a collection holds functions.
          ValueError: if a collection has a name that `TrainState` uses itself.
        """
        if not isinstance(tx, MixedPrecision):
            raise TypeError(
                f"tx must be jaxmp.mixed_precision(optimizer, policy), got {type(tx).__name__}"
            )
        taken = {*dir(cls), *(field.name for field in dataclasses.fields(cls)), *_RESERVED}
        if clash := sorted(taken & set(collections)):
            raise ValueError(
                f"collections cannot be called {clash}: TrainState uses such a name itself"
            )
        functions = [
            name
            for name, value in collections.items()
            if any(callable(leaf) for leaf in jax.tree.leaves(value))
        ]
        if functions:
            raise TypeError(
                f"{', '.join(functions)} must be trees of arrays. TrainState keeps no functions: "
                "let the loss function close over model.apply"
            )
        params = _copy(params)
        params, opt_state = tx.init_params(params) if cast_params else (params, tx.init(params))
        state = cls(
            step=jnp.int32(0),
            params=params,
            opt_state=_copy(opt_state),
            collections=_copy(collections),
            tx=tx,
        )
        return placed_beside(params, state)

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss scale with which to scale the next loss."""
        return self.opt_state.loss_scale

    def __getattr__(self, name: str) -> PyTree:
        collections = self.__dict__.get("collections")
        if isinstance(collections, Mapping) and name in collections:
            return collections[name]
        raise AttributeError(f"TrainState has no field or collection {name!r}")

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with other fields or collections, by name.

        Args:
          **changes: new values. Unlike in `apply_gradients`, nothing is checked or skipped.

        Returns:
          The changed state.
        """
        collections = {k: v for k, v in changes.items() if k in self.collections}
        fields = {k: v for k, v in changes.items() if k not in collections}
        fields["collections"] = fields.get("collections", self.collections) | collections
        return dataclasses.replace(self, **fields)

    def apply_gradients(
        self,
        grads: PyTree,
        extra: dict[str, Any] | None = None,
        *,
        finite: Bool[Array, ""] | None = None,
        **collections: PyTree,
    ) -> "TrainState":
        """The state after one optimizer step, or after a skipped one.

        A step is skipped if a gradient is not finite, or if a number in a collection was finite
        and no longer is: batch statistics can overflow in a batch whose gradients vanish. (Not
        with an optimizer that never skips.)

        Args:
          grads: unscaled gradients, as `jaxmp.value_and_grad` returns them.
          extra: further arguments for the inner optimizer's update, such as `{"value": loss}`.
          finite: whether to take the step, in place of this test. Inside `shard_map` it has to
            be the same on all devices.
          **collections: new values of collections; those not named stay.

        Returns:
          The next state. After a skip, only its loss scale and its counts of skipped steps
          differ.

        Raises:
          ValueError: for a collection that the state does not have, or that changed structure.
        """
        new_collections = _updated(self.collections, collections)
        if finite is None:
            finite = all_finite(grads) & stays_finite(new_collections, self.collections)
        params, opt_state = self.tx.apply_gradients(
            grads, self.opt_state, self.params, finite=finite, **(extra or {})
        )
        finite = opt_state.grads_finite
        return dataclasses.replace(
            self,
            step=self.step + finite.astype(jnp.int32),
            params=params,
            opt_state=opt_state,
            collections=select(finite, new_collections, self.collections),
        )


def make_train_step(
    loss_fn: Callable[..., Any],
    policy: str | jmp.Policy | None = None,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    cast_batch: bool = True,
    donate: bool = True,
    fsdp: FSDP | None = None,
    shardings: PyTree | None = None,
) -> jax.stages.Wrapped:
    """A jitted train step: cast, scale, differentiate, unscale, update or skip.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, a float scalar. If the state has collections it
        is called as `loss_fn(params, batch, **collections)` and returns `(loss, collections)`,
        a dictionary with the new values of those that changed.
      policy: casts params and batch to its compute dtype before `loss_fn` sees them. None leaves
        that to the model, as for Flax modules with a `dtype` of their own, or to `autocast`, which
        `"O1"` puts around `loss_fn`. It must compute in the dtype for which the optimizer was
        wrapped, since that chose the loss scale.
      has_aux: whether `loss_fn` returns one thing more, as its last: `(loss, aux)`, or
        `(loss, collections, aux)`. It comes back as `metrics["aux"]`, with a leading axis of
        microbatches if there are several.
      microbatches: evaluate the batch in this many parts and average in float32, for a loss that
        is a mean over the batch; collections pass from one part to the next.
      cast_batch: whether the policy casts the batch too. False for a batch with float targets
        that must not be rounded; cast the inputs in `loss_fn` then.
      donate: reuse the buffers of the state for the new one. The old state is gone after a step,
        and must not be read: False where it may be, as in a notebook.
      fsdp: how the params lie on the devices, if they are split to save memory:
        `jaxmp.sharding.FSDP`.
      shardings: those of the state, from `jaxmp.sharding.state_shardings`, for the new state to lie
        where the old one did. Left alone the partitioner may move it, which copies it once and
        compiles the next step anew.

    Returns:
      A jitted `step(state, batch) -> (state, metrics)`. Beside non-finite gradients, a loss or a
      norm of the gradients that is not finite skips the step. The metrics are arrays, so reading
      none of them costs no synchronisation: `loss` and `grad_norm` (float32, unscaled, before any
      clipping), `grads_finite`, `loss_scale` (the one this step used), `skipped` and
      `consecutive_skips`. The inner optimizer is given `value=loss`. It is not made for
      `shard_map`, where each device has a loss of its own: use `value_and_grad` and
      `state.apply_gradients(grads, finite=...)` there.

    Raises:
      ValueError: if the policy computes in float8, or `microbatches` is no positive number.
      TypeError: for rules, which belong to a model, and for `fsdp` of another type.

    >>> import jaxmp
    >>> tx = jaxmp.mixed_precision(optax.sgd(0.5), "mixed_bfloat16")
    >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
    >>> step = make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), "mixed_bfloat16")
    >>> state, metrics = step(state, jnp.eye(2))
    >>> state.params["w"], float(metrics["loss"])
    (Array([0.5, 0.5], dtype=float32), 1.0)
    """
    casts = policy is not None
    if isinstance(policy, str) and policy.strip() == "O1":
        loss_fn, casts = autocast(loss_fn, policy), False
    policy = _one_policy(policy)
    check_fsdp(fsdp)
    check_microbatches(microbatches)

    def loss_and_rest(params: PyTree, batch: PyTree, collections: dict[str, PyTree]) -> Any:
        if policy is not None and casts:
            params = policy.cast_to_compute(params)
            batch = policy.cast_to_compute(batch) if cast_batch else batch
        out = loss_fn(params, batch, **collections)
        loss, changed, aux = _unpack(out, bool(collections), has_aux)
        return loss, (_updated(collections, changed), aux)

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        _check_same_dtypes(policy, state.tx.policy)
        _check_shardings(shardings, state)
        evaluate = scaled_evaluation(
            loss_and_rest,
            (0,),
            True,
            state.loss_scale,
            1.0 / microbatches,
            reduction=_reduction(state.tx.rules, fsdp),
        )

        def evaluate_part(collections: Any, part: PyTree) -> tuple[Any, Evaluation]:
            loss, (grads,), (collections, aux) = evaluate(state.params, part, collections)
            return collections, Evaluation(loss, grads, aux)

        if microbatches == 1:
            collections, (loss, grads, aux) = evaluate_part(state.collections, batch)
        else:
            collections, (loss, grads, aux) = sum_over_microbatches(
                evaluate_part,
                state.collections,
                state.params,
                split_batch(batch, microbatches),
            )
        grad_norm = optax.tree.norm(grads)
        finite = all_finite((loss, grad_norm, grads)) & stays_finite(collections, state.collections)
        new = state.apply_gradients(grads, {"value": loss}, finite=finite, **collections)
        metrics = {"loss": loss, "grad_norm": grad_norm} | _metrics(state, new)
        return new, metrics | ({"aux": aux} if has_aux else {})

    placed = None if shardings is None else (shardings, None)
    return jax.jit(train_step, donate_argnums=(0,) if donate else (), out_shardings=placed)


def _metrics(old: TrainState, new: TrainState) -> Metrics:
    """What became of a step."""
    return {
        "grads_finite": new.opt_state.grads_finite,
        "loss_scale": old.loss_scale.scale,
        "skipped": new.opt_state.skipped,
        "consecutive_skips": new.opt_state.consecutive_skips,
    }


def _reduction(rules: PolicyRules, fsdp: FSDP | None) -> GradientReduction | None:
    """How the gradients of a model under rules are reduced: as wide as any policy asks for.

    There is nothing to do where all of them compute that wide.
    """
    narrow = [policy for policy in all_policies(rules) if policy.compute_dtype.itemsize < 4]
    if not narrow:
        return gradient_reduction(None, fsdp)
    widest = max((policy.reduce_dtype for policy in narrow), key=lambda dtype: dtype.itemsize)
    return gradient_reduction(jnp.float32 if widest.itemsize > 4 else widest, fsdp)


def _one_policy(policy: Any) -> Policy | None:
    """The policy to which a step casts all params, unless it is one that needs more than that."""
    if isinstance(policy, PolicyRules) or (isinstance(policy, str) and policy.strip() == "O2"):
        raise TypeError(
            "make_train_step casts all params to one dtype, which is not what rules ('O2' is some) "
            "ask for. Put the model under them with jaxmp.linen.apply_policy or "
            "jaxmp.nnx.apply_policy, and give make_train_step no policy"
        )
    policy = None if policy is None else get_policy(policy)
    if policy is not None and policy.compute_dtype.itemsize == 1:
        raise ValueError(
            f"make_train_step cannot compute in {policy.compute_dtype}: a plain cast to float8 "
            "loses small gradients. Use 'mixed_bfloat16'"
        )
    return policy


def _check_same_dtypes(policy: Policy | None, wrapped: Policy) -> None:
    if policy is not None and policy.compute_dtype != wrapped.compute_dtype:
        raise ValueError(
            f"the train step computes in {policy.compute_dtype}, but the optimizer was wrapped for "
            f"{wrapped.compute_dtype}, and its loss scale chosen for that. Give make_train_step "
            "and mixed_precision the same policy"
        )
    if policy is not None and policy.reduce_dtype != wrapped.reduce_dtype:
        raise ValueError(
            f"the train step reduces gradients in {policy.reduce_dtype}, but the optimizer was "
            f"wrapped for {wrapped.reduce_dtype}. Give both the same policy"
        )


def _check_shardings(shardings: PyTree, state: TrainState) -> None:
    """Raises before JAX does, which would name `pjit out_shardings` and types of nodes."""

    def is_one(x: Any) -> bool:
        return x is None or isinstance(x, (jax.P, jax.sharding.Sharding))

    if isinstance(shardings, TrainState) and shardings.tx != state.tx:
        raise ValueError(
            "the shardings were made of a state with another optimizer: make both states with the "
            "same tx, which jaxmp.mixed_precision returned once"
        )
    try:
        jax.tree.broadcast(shardings, state, is_leaf=is_one)
    except ValueError as error:
        said = f": {error}" if isinstance(shardings, TrainState) else ""
        raise ValueError(
            "shardings must be those of the whole state, jaxmp.sharding.state_shardings(state, "
            f"params), or a prefix of such a tree, got a {type(shardings).__name__} (those of the "
            f"params alone belong into fsdp=FSDP(shardings=...)){said}"
        ) from None


def _unpack(out: Any, has_collections: bool, has_aux: bool) -> tuple[Any, dict[str, Any], Any]:
    form = ["loss", *["collections"] * has_collections, *["aux"] * has_aux]
    parts = (out,) if len(form) == 1 else out
    if not isinstance(parts, tuple) or len(parts) != len(form) or isinstance(parts[0], tuple):
        returned = f"a tuple of {len(out)}" if isinstance(out, tuple) else f"a {type(out).__name__}"
        hint = "" if has_aux else ". For another output beside it, give has_aux=True"
        raise TypeError(
            f"the loss function must return ({', '.join(form)}) here, got {returned}{hint}"
        )
    loss, *rest = parts
    changed = rest[0] if has_collections else {}
    if not isinstance(changed, Mapping):
        raise TypeError(
            f"the collections that the loss function returns must be a dictionary by name, got "
            f"{type(changed).__name__}"
        )
    return loss, dict(changed), rest[-1] if has_aux else None


def _updated(old: dict[str, PyTree], changed: dict[str, PyTree]) -> dict[str, PyTree]:
    """The collections with new values, in the dtypes of the old: a step must keep its types."""
    for name, new in changed.items():
        if name not in old:
            near = suggestion(name, list(old))
            raise ValueError(
                f"the state has no collection {name!r}.{near} It has: {', '.join(old) or 'none'}. "
                "Give it to TrainState.create"
            )
        check_like(
            new,
            old[name],
            name=f"collection {name!r}",
            like_name="the old one",
            advice="A step must keep the structure of a collection.",
        )

    def cast_like(x: Any, y: Any) -> Any:
        return cast_floating(jnp.asarray(x), y.dtype) if is_floating(y) else x

    return old | {name: jax.tree.map(cast_like, new, old[name]) for name, new in changed.items()}


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), strong(tree))
