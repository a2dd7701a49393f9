"""The optimizer wrapper: float32 masters, skip on overflow, loss scale, in one optax transform."""

import copy
from typing import Any, Literal, get_args

import jax.numpy as jnp  # noqa: F401 (for the doctests)
import jmp
import optax
from jaxtyping import Array, Bool, PyTree

from jaxmp._compact_state import Moments, checked_optimizer
from jaxmp._loss_scale import LossScale, NoLossScale, StaticLossScale, choose_loss_scale
from jaxmp._master_storages import STORAGES
from jaxmp._masters import Masters
from jaxmp._optimizer_step import Algorithm, MixedPrecisionState
from jaxmp._outermost import refuse_to_be_wrapped
from jaxmp._policy import Policy, get_policy
from jaxmp._rules import PolicyRules
from jaxmp._skipping import Skip
from jaxmp._tree import check_arrays, strong
from jaxmp.rules import dtypes_of, get_rules


class MixedPrecision(optax.GradientTransformationExtraArgs):
    """What `mixed_precision` returns: an optax transformation that knows its policy.

    Use `init` and `update` as of any optax optimizer. `init_params` and `apply_gradients` do the
    same for people who do not need updates, and are exact to the last bit.

    Attributes:
      init: `init(params) -> MixedPrecisionState`.
      update: `update(grads, state, params, *, finite=None, **extra) -> (updates, state)`.
      policy: the policy given, or the default of the rules, or float32 if they have none.
      rules: the rules given, or those that hold the policy everywhere.
      loss_scale: the config of the loss scale.
    """

    policy: Policy
    rules: PolicyRules
    loss_scale: LossScale
    _algorithm: "Algorithm"

    def _replace(self, **changes: Any) -> "MixedPrecision":
        """The same with other functions; NamedTuple's own would forget the policy."""
        if any(changes[name] is not getattr(self, name) for name in changes):
            raise ValueError(
                "init and update of mixed_precision belong together, and cannot be replaced. "
                "Change the optimizer inside: mixed_precision(inner._replace(...), policy)"
            )
        return copy.copy(self)

    def init_params(
        self, params: PyTree, *, like: PyTree = None
    ) -> tuple[PyTree, MixedPrecisionState]:
        """Casts params to the policy's dtype, and keeps what they were as the masters.

        `init(policy.cast_to_param(params))` would start the masters from rounded params.

        Args:
          params: a tree of floats, usually float32. Donate neither them nor what this returns:
            params that need no cast, and masters, are the given arrays themselves.
            `TrainState.create` makes copies.
          like: a tree whose dtypes the live params have, in place of the policy's.

        Returns:
          The live params in `policy.param_dtype`, and the optimizer state. If the optimizer was
          wrapped for rules, the live params are the given ones, as the model made them.
        """
        check_arrays(params, "params")
        params = strong(params)
        if like is None:
            like = params if self.rules.rules else self.policy.cast_to_param(params)
        return self._algorithm.init(like, params)

    def apply_gradients(
        self,
        grads: PyTree,
        state: MixedPrecisionState,
        params: PyTree,
        *,
        finite: Bool[Array, ""] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, MixedPrecisionState]:
        """One optimizer step, or a skipped one: `update` and `optax.apply_updates` in one.

        The new params are the rounded masters to the last bit, and no updates are stored.

        Args:
          grads: unscaled gradients, as `jaxmp.value_and_grad` returns them.
          state: the optimizer state.
          params: the live params.
          finite: whether to take the step, in place of `all_finite(grads)`. If it is false, the
            loss scale backs off too. Inside `shard_map` with sharded gradients it has to be the
            same on all devices: `jax.lax.pmin(jaxmp.all_finite(grads), axis)`. Not looked at
            with `skip="none"`.
          **extra: further arguments of the inner optimizer's update, such as `value=loss`.

        Returns:
          The params and the state after the step; after a skipped step, the very same params.
        """
        return self._algorithm.step(grads, state, params, finite, extra, as_updates=False)


def mixed_precision(
    inner: optax.GradientTransformation | optax.MultiSteps,
    policy: str | jmp.Policy | PolicyRules,
    *,
    loss_scale: LossScale | Literal["auto"] = "auto",
    master: Literal["float32", "remainder", "remainder8", "kahan", "stochastic", "none"] = (
        "float32"
    ),
    moments: Moments = "float32",
    skip: Skip = "auto",
) -> MixedPrecision:
    """Wraps an optax optimizer so that it trains low-precision params safely.

    The inner optimizer only ever sees float32: float32 masters as its params, float32 gradients.
    Its moments, schedules and clipping norms are therefore right (in bfloat16, `b2=0.999` rounds
    to 1 and Adam's second moment never decays). If a gradient is not finite, the step is skipped:
    params, masters and the whole inner state keep every bit, and the loss scale backs off.

    Everything else goes inside, where it sees unscaled float32 gradients:
    `mixed_precision(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr)), policy)`.

    Args:
      inner: any optax optimizer, chain, or `optax.MultiSteps`.
      policy: the policy of the model, its name, or the rules that the model is under. It chooses
        the loss scale, and the dtype of the params that `init_params` and `TrainState.create`
        make (with rules, params keep the dtypes that the model gave them). The masters follow
        the dtypes of the params themselves, leaf by leaf.
      loss_scale: a config, or `"auto"`: `DynamicLossScale()` if params or computation are
        float16 anywhere, else `NoLossScale()`.
      master: how the float32 master of a param narrower than 32 bits is kept (a float32 param is
        its own, with no copy). `"float32"`: as it is, 4 bytes beside the param. `"remainder"`: the
        16 bits that a bfloat16 param lacks, 2 bytes: nothing is lost, and params round ties
        away from zero. `"remainder8"`: 8 of them, 1 byte. `"kahan"`: the rounding error, 2
        bytes, for float16 params too. `"stochastic"`: no bytes; params are rounded up or down at
        random. `"none"`: no bytes, and small updates are lost.
      moments: in what the state of the optimizer is stored: `"float32"`, or `"bfloat16"` or
        `"int8"` as by `jaxmp.compact_state`, which takes it for a part of the optimizer alone.
        `"int8"` is for a state that has moments alone: no average of params.
      skip: how a step is skipped. `"cond"` computes nothing on a skip: a `lax.cond`, and on GPUs a
        loop of at most one trip, as some of their compilers copy the whole state for a branch.
        `"select"` computes the step and then chooses between old and new state, element by
        element. `"auto"` is what needs no memory: `"cond"` on CPUs and TPUs, `"select"` on GPUs,
        whose compilers fuse a choice into the update. `"none"` does not test the gradients at all,
        and applies whatever comes.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its `update` needs the params, and returns
      float32 updates: `optax.apply_updates` adds them and rounds to the param's dtype. On a
      skipped step they are zero. `apply_gradients` is exact where updates cannot be, needs no
      memory for them, and works under strict dtype promotion, where optax's sum of a bfloat16
      param and a float32 update does not.

    Raises:
      ValueError: for an unknown option, or a dynamic loss scale with `skip="none"`.
      TypeError: if `inner` is no optimizer or `loss_scale` no config.

    >>> tx = mixed_precision(optax.sgd(0.5), "bfloat16")
    >>> params = {"w": jnp.bfloat16(1.0)}
    >>> state = tx.init(params)
    >>> params, state = tx.apply_gradients({"w": jnp.float32(0.25)}, state, params)
    >>> params, state.master
    ({'w': Array(0.875, dtype=bfloat16)}, {'w': Array(0.875, dtype=float32)})
    >>> updates, state = tx.update({"w": jnp.float32(jnp.inf)}, state, params)
    >>> float(updates["w"]), int(state.skipped)
    (-0.0, 1)
    """
    rules = get_rules(policy)
    config = choose_loss_scale(loss_scale, dtypes_of(rules))
    if master not in STORAGES:
        raise ValueError(f"master must be one of {', '.join(map(repr, STORAGES))}, got {master!r}")
    if skip not in get_args(Skip):
        raise ValueError(
            f"skip must be one of {', '.join(map(repr, get_args(Skip)))}, got {skip!r}"
        )
    if skip == "none" and not isinstance(config, (NoLossScale, StaticLossScale)):
        raise ValueError(
            "a dynamic loss scale finds its value by overflowing, and skip='none' would apply the "
            "overflowed gradients. Use another skip, or a static loss scale"
        )
    masters, computed = Masters(master), frozenset(dtypes_of(rules))
    inner = _as_transformation(inner, moments)
    algorithm = Algorithm(inner, moments, config, masters, skip, computed)

    def init(params: PyTree) -> MixedPrecisionState:
        refuse_to_be_wrapped()
        return algorithm.init(params, params)[1]

    def update(
        grads: PyTree,
        state: MixedPrecisionState,
        params: PyTree | None = None,
        *,
        finite: Bool[Array, ""] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, MixedPrecisionState]:
        refuse_to_be_wrapped()
        return algorithm.step(grads, state, params, finite, extra, as_updates=True)

    tx = MixedPrecision(init, update)
    tx.rules, tx.policy = rules, rules.default or get_policy("float32")
    tx.loss_scale, tx._algorithm = config, algorithm
    return tx


def _as_transformation(inner: Any, moments: Moments) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, MixedPrecision):
        raise TypeError("the optimizer is wrapped in mixed_precision already; wrap it once")
    return checked_optimizer(inner, moments)
