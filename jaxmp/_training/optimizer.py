"""The optimizer wrapper: float32 masters, skip on overflow, loss scale, in one optax transform."""

import dataclasses
import pickle
import sys
import types
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp  # noqa: F401 (for the doctests)
import jmp
import optax
from jaxtyping import Array, Bool, PyTree

from jaxmp._numerics.loss_scale import LossScale, NoLossScale, StaticLossScale, choose_loss_scale
from jaxmp._numerics.tree import check_arrays, strong
from jaxmp._policies.policy import Policy, get_policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import dtypes_of, get_rules
from jaxmp._training.compact_state import Moments, check_optimizer
from jaxmp._training.master_storages import STORAGES
from jaxmp._training.masters import Masters
from jaxmp._training.optimizer_step import Algorithm, MixedPrecisionState
from jaxmp._training.other_products import warn_of_other_products
from jaxmp._training.skipping import Skip


class MixedPrecision(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows its policy, as `mixed_precision` returns it.

    Use `init` and `update` as with any optax optimizer. If you do not need updates, `init_params`
    and `apply_gradients` do the same, and are exact to the last bit.

    Attributes:
      init: `init(params) -> MixedPrecisionState`.
      update: `update(updates, state, params, *, finite=None, **extra) -> (updates, state)`, which
        takes unscaled gradients.
      policy: the policy given, or the default of the rules, or float32 if the rules have none.
      rules: the rules given, or rules that apply the policy everywhere.
      loss_scale: the config of the loss scale.
    """

    rules: PolicyRules
    _algorithm: Algorithm

    def __new__(cls, algorithm: Algorithm, rules: PolicyRules) -> "MixedPrecision":
        """Builds the transformation from the optimizer step and the rules of the model."""

        def init(params: PyTree) -> MixedPrecisionState:
            refuse_to_be_wrapped()
            return algorithm.init(params)[1]

        def update(
            updates: PyTree,
            state: MixedPrecisionState,
            params: PyTree | None = None,
            *,
            finite: Bool[Array, ""] | None = None,
            **extra: Any,
        ) -> tuple[PyTree, MixedPrecisionState]:
            refuse_to_be_wrapped()
            new = algorithm.step(updates, state, params, finite, extra, as_updates=True)
            warn_of_other_products(updates, rules)
            return new

        tx: MixedPrecision = super().__new__(cls, init, update)
        tx.rules, tx._algorithm = rules, algorithm
        return tx

    @property
    def policy(self) -> Policy:
        return self.rules.default or get_policy("float32")

    @property
    def loss_scale(self) -> LossScale:
        return self._algorithm.loss_scale

    def _replace(self, **changes: Any) -> "MixedPrecision":
        """Returns the same transformation; raises ValueError for another `init` or `update`."""
        if any(changes[name] is not getattr(self, name) for name in changes):
            raise ValueError(
                "init and update of mixed_precision belong together, and cannot be replaced. "
                "Change the optimizer inside: mixed_precision(inner._replace(...), policy)"
            )
        return self

    def __deepcopy__(self, *_: Any) -> "MixedPrecision":
        return self  # nothing in it changes, and a copied state fits the same step

    def __reduce__(self) -> Any:
        # Optimizers are functions inside of functions, which pickle alone does not write.
        try:
            import cloudpickle
        except ModuleNotFoundError:
            raise TypeError("an optimizer is pickled by cloudpickle: pip install it") from None
        algorithm = dataclasses.replace(self._algorithm, _expected_states={})
        return _unpickled, (type(self), cloudpickle.dumps((algorithm, self.rules)))

    def init_params(
        self, params: PyTree, *, like: PyTree = None
    ) -> tuple[PyTree, MixedPrecisionState]:
        """Casts params to the policy's dtype, and keeps their old values as the masters.

        `init(policy.cast_to_param(params))` would start the masters from rounded params.

        Args:
          params: a tree of floats, usually float32. Do not donate them or the results: params that
            need no cast, and masters, are the given arrays themselves. `TrainState.create` makes
            copies.
          like: a tree with the dtypes for the live params, in place of the policy's.

        Returns:
          The live params in `policy.param_dtype`, and the optimizer state. If the optimizer was
          wrapped for rules, the live params keep the dtypes that the model gave them.
        """
        return params_and_state(self, params, like=like)

    def apply_gradients(
        self,
        grads: PyTree,
        state: MixedPrecisionState,
        params: PyTree,
        *,
        finite: Bool[Array, ""] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, MixedPrecisionState]:
        """Takes or skips one optimizer step: `update` and `optax.apply_updates` in one.

        The new params are the rounded masters to the last bit, and no updates are stored.

        Args:
          grads: unscaled gradients, as `jaxmp.value_and_grad` returns them.
          state: the optimizer state.
          params: the live params.
          finite: whether to take the step, in place of `all_finite(grads)`. If it is false, the
            loss scale backs off too. Inside `shard_map` with sharded gradients it must be the same
            on all devices: `jax.lax.pmin(jaxmp.numbers.all_finite(grads), axis)`. Ignored with
            `skip="none"`.
          **extra: further arguments of the inner optimizer's update, such as `value=loss`.

        Returns:
          The params and the state after the step; after a skipped step, the very same params.
        """
        new = self._algorithm.step(grads, state, params, finite, extra, as_updates=False)
        warn_of_other_products(grads, self.rules)
        return new


def check_wrapped(tx: Any) -> None:
    """Raises TypeError for an optimizer that `mixed_precision` did not return."""
    if not isinstance(tx, MixedPrecision):
        raise TypeError(
            f"tx must be jaxmp.mixed_precision(optimizer, policy), got {type(tx).__name__}"
        )


def params_and_state(
    tx: MixedPrecision,
    params: PyTree,
    *,
    like: PyTree = None,
    cast_params: bool = True,
    own: bool = False,
) -> tuple[PyTree, MixedPrecisionState]:
    """Returns what `MixedPrecision.init_params` does; copies alone if `own`.

    Without `cast_params` the dtypes of the params stay as they are.
    """
    check_arrays(params, "params")
    if like is None and cast_params and not tx.rules.rules:
        like = jax.eval_shape(tx.policy.cast_to_param, strong(params))
    return tx._algorithm.init(params, like, own=own)


def _unpickled(cls: type[MixedPrecision], parts: bytes) -> MixedPrecision:
    return cls(*pickle.loads(parts))


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

    Put everything else inside, where it sees unscaled float32 gradients:
    `mixed_precision(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr)), policy)`.

    Args:
      inner: any optax optimizer, chain, or `optax.MultiSteps`.
      policy: the policy of the model, the name of a policy, or the rules of the model. It
        determines the loss scale, and the dtype of the params that `init_params` and
        `TrainState.create` make (with rules, params keep the dtypes that the model gave them). Each
        master depends on the dtype of its param, not on the policy.
      loss_scale: a config, or `"auto"`: `DynamicLossScale()` if params or computation are
        float16 anywhere, else `NoLossScale()`.
      master: how the float32 master of a param narrower than 32 bits is kept (a float32 param is
        its own master, with no copy). `"float32"`: whole, 4 bytes more. `"remainder"`: the 16 bits
        that a bfloat16 param lacks, 2 bytes: nothing is lost, and params round ties away from zero.
        `"remainder8"`: 8 of these bits, 1 byte. `"kahan"`: the rounding error, 2 bytes, for float16
        params too. Both are rounded up or down at random, so that small updates add up in the mean.
        `"stochastic"`: no bytes; params are rounded at random. `"none"`: no bytes, and small
        updates are lost.
      moments: the dtype in which the state of the optimizer is stored: `"float32"`, or `"bfloat16"`
        or `"int8"` as by `jaxmp.storage.compact_state` (use that for a part of the optimizer).
        `"int8"` is for a state that has only moments, no average of params.
      skip: how a step is skipped. `"cond"` computes nothing on a skip: a `lax.cond`, and on GPUs a
        loop of at most one iteration, as some GPU compilers copy the whole state for a branch.
        `"select"` computes the step and then chooses between old and new state, element by element.
        `"auto"` is the one that needs no memory: `"cond"` on CPUs and TPUs, `"select"` on GPUs,
        whose compilers fuse the selection into the update. `"none"` does not test the gradients,
        and applies them all.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its `update` needs the params, and returns
      float32 updates: `optax.apply_updates` adds them and rounds to the param's dtype. On a
      skipped step they are zero. `apply_gradients` is exact where updates cannot be, needs no
      memory for them, and works under strict dtype promotion, where optax cannot add a float32
      update to a bfloat16 param.

    Raises:
      ValueError: for an unknown option, or a dynamic loss scale with `skip="none"`.
      TypeError: if `inner` is not an optimizer or `loss_scale` is not a config.

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
    # First, as it is the first argument: where the two are swapped, this is what to say.
    if isinstance(inner, MixedPrecision):
        raise TypeError("the optimizer is wrapped in mixed_precision already; wrap it once")
    inner = check_optimizer(inner, moments)
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
    algorithm = Algorithm(inner, moments, config, masters, skip, computed)
    return MixedPrecision(algorithm, rules)


def refuse_to_be_wrapped() -> None:
    """Raises if the caller is a combinator: `chain`, `MultiSteps` or `compact_state`."""
    # A combinator around the wrapper would take the zero updates of skipped steps for real ones. Or
    # it would scale the updates, after which params and masters no longer agree. It leaves no trace
    # in the arguments that it passes, so that only the caller's module shows it. Frames of jaxmp
    # and of runtime type checkers hide the caller.
    hiding = ("jaxmp", "jaxtyping", "beartype")
    frame: types.FrameType | None = sys._getframe(1)
    module = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in hiding or module.startswith(_COMBINATORS):
            break
        module, frame = "", frame.f_back
    # optax.tree_utils calls init to learn the layout of the state, which is fine.
    if module.startswith(_COMBINATORS) and not module.startswith("optax.tree_utils"):
        raise ValueError(
            f"mixed_precision must be the outermost transformation, but {module} called it. Put "
            "the other transformation inside: mixed_precision(optax.chain(clip, adamw), policy), "
            "mixed_precision(optax.MultiSteps(adamw, 4), policy)"
        )


_COMBINATORS = ("optax.", "jaxmp._training.compact_state")
