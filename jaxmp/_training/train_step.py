"""The jitted train step, assembled from gradients, loss scale, optimizer and state."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import PyTree

from jaxmp._float32_reduction.api import GradientReduction, check_fsdp, gradient_reduction
from jaxmp._gradient_release.api import release_gradients
from jaxmp._mesh.fsdp import FSDP
from jaxmp._numerics.loss_scale import NoLossScale
from jaxmp._numerics.tree import all_finite, split_floats, stays_finite
from jaxmp._numerics.user_warnings import check_option
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import all_policies, dtypes_of, get_rules
from jaxmp._program.mesh_axes import on_axes_of
from jaxmp._program.tracing import on_automatic_axes_inside
from jaxmp._recompute.api import Recompute, check_recompute
from jaxmp._training.gradient_options import GradientOptions
from jaxmp._training.gradients import scaled_evaluation
from jaxmp._training.jitted_step import TrainStep, check_state
from jaxmp._training.line_search import step_with_first_offer, value_function
from jaxmp._training.loss_under_policy import (
    Cast,
    LossUnderRules,
    lowered_loss,
    model_casts,
    rules_of_step,
)
from jaxmp._training.microbatch import Evaluation, check_microbatches, sum_over_microbatches
from jaxmp._training.step_metrics import (
    Metrics,
    check_histograms_every,
    gradient_metrics,
    step_metrics,
)
from jaxmp._training.train_state import TrainState, update_collections
from jaxmp._training.whole_batch import warn_of_whole_batch

Gradients = Literal["buffered", "released"]


def make_train_step(
    loss_fn: Callable[..., Any],
    policy: str | jmp.Policy | PolicyRules | None = None,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    cast: Cast = "products",
    extra_args: Callable[..., Mapping[str, Any]] | None = None,
    donate: bool = True,
    fsdp: FSDP | None = None,
    shardings: PyTree | None = None,
    recompute: Recompute = "loops",
    gradients: Gradients = "buffered",
    count_overflows: bool = False,
    histograms_every: int | None = None,
) -> "TrainStep":
    """Makes a jitted train step: cast, scale, differentiate, unscale, update or skip.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, a float scalar. If the state has collections it
        is called as `loss_fn(params, batch, **collections)` and returns `(loss, collections)`,
        a dictionary with the new values of those that changed.
      policy: by default the policy, or the rules, for which the optimizer of the state was wrapped:
        `loss_fn` runs under it, as `cast` says. `"none"` leaves the dtypes to a model that casts by
        itself, as Flax modules under `apply_policy` do. A policy that is given must compute and
        reduce in the dtypes of that of the optimizer, which determined the loss scale.
      has_aux: whether `loss_fn` also returns `aux`: `(loss, aux)`, or `(loss, collections, aux)`.
        The step returns it as `metrics["aux"]`, with a leading axis of microbatches if there are
        several.
      microbatches: evaluate the batch in this many parts and average in float32, for a loss that
        is a mean over the batch; collections pass from one part to the next.
      cast: `"products"` puts `loss_fn` under `jaxmp.autocast`: matrix products, convolutions and
        kernels read 16 bits. Everything else in the batch, such as labels near
        1000, class ids and time stamps, keeps every bit. So do collections: if one holds a teacher,
        its kernels read float32 where its biases reach them. `"all"` casts all floating params and
        the whole batch, labels too, before `loss_fn` sees them, as jmp does. `"params"` casts the
        params alone, for a batch with float targets that must not be rounded: cast the inputs in
        `loss_fn`.
      extra_args: `extra_args(state, batch, loss)` returns further keyword arguments for the update
        of the inner optimizer, such as `{"grad_fn": ...}` for `optax.contrib.sam`. Optimizers that
        take them get `value=loss`, `grad=` the gradients (float32, unscaled), and `value_fn`, the
        loss of the batch as a function of float32 params: so `optax.lbfgs()` works as it is.
      donate: whether to reuse the buffers of the old state for the new one. After a step the old
        state is gone and must not be read. Give False where it may be read, as in a notebook. Put
        no `jax.jit` around the step: it is jitted, and inside of another nothing is donated.
      fsdp: a `jaxmp.sharding.FSDP` with the shardings of the params, if they are split to save
        memory.
      shardings: the shardings of the state, from `jaxmp.sharding.state_shardings`, which the new
        state then keeps. Without them the partitioner may move the state, which copies it once and
        compiles the next step anew.
      recompute: which residuals to recompute in the backward pass instead of keeping them; see
        `jaxmp.recompute`. By default cheap ones inside of `scan`, as over layers; `"never"` keeps
        all of them, `"auto"` and `"always"` look outside of loops, too, and `0.2` is a share of
        what JAX would keep. Or a function that wraps the loss, such as
        `functools.partial(jaxmp.recompute, mode="loops", codes="int8")`.
      gradients: `"released"` updates each layer of a scan where its gradient is made, and keeps no
        gradients; see `jaxmp.release_gradients`.
      count_overflows: whether `metrics["nonfinite"]` says how many numbers of each gradient are
        infinite or NaN, in the structure of the params, uint32. They are counted in skipped steps
        alone. `check_progress` names the params with the most.
      histograms_every: every how many calls `metrics["histograms"]` has the histograms of the
        gradients, float32 and unscaled, of the first call on. It is a
        `Histograms`, all zero in the calls between.

    Returns:
      A jitted `step(state, batch) -> (state, metrics)`, which can be lowered and traced like a
      function from `jax.jit`. It skips the step if the loss, a gradient or the norm of the
      gradients is not finite. The metrics are arrays, and cost no synchronisation unless they are
      read: `loss` and `grad_norm` (float32, unscaled, before any clipping), `grads_finite`,
      `loss_scale` (the scale of this step), `skipped` and `consecutive_skips`. Do not use it in a
      `shard_map`, where each device has its own loss: use `value_and_grad` and
      `state.apply_gradients(grads, finite=...)` there.

    Raises:
      ValueError: if the policy computes in float8, `microbatches` or `histograms_every` is not a
        positive number, or `cast` or `recompute` is unknown. In the first step, if the policy is
        not that of the optimizer, or is rules about types of modules, which a function has not.
      TypeError: if `loss_fn` is not callable, or `fsdp` is not an `FSDP`.

    Warns:
      UserWarning: in the first step, if the optimizer was wrapped for 16 bits, and all products
        read other dtypes, as under `"none"` where the model does not cast; and if each of several
        devices computes the whole batch.

    >>> import jaxmp
    >>> tx = jaxmp.mixed_precision(optax.sgd(0.5), "mixed_bfloat16")
    >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
    >>> step = make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2))
    >>> state, metrics = step(state, jnp.eye(2))
    >>> state.params["w"], float(metrics["loss"])
    (Array([0.5, 0.5], dtype=float32), 1.0)
    """
    options = StepOptions(
        policy=policy,
        has_aux=has_aux,
        microbatches=microbatches,
        cast=cast,
        extra_args=extra_args,
        fsdp=fsdp,
        recompute=recompute,
        gradients=gradients,
        count_overflows=count_overflows,
        histograms_every=histograms_every,
    )
    one_step = options.step(loss_fn)

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        check_state(state, batch)
        _check_shardings(shardings, state)
        form = ", ".join(["params", "batch", *(f"{name}=..." for name in state.collections)])
        check_takes(loss_fn, f"({form})", state.params, batch, **state.collections)
        return one_step(state, batch)

    # Without them the compiler chooses where the new state lies, and may not reuse the old buffers.
    placed = None if shardings is None else (shardings, None)
    run = options.released(train_step)
    jitted = jax.jit(run, donate_argnums=(0,) * donate, out_shardings=placed)
    warn = functools.partial(warn_of_whole_batch, loss_fn, fsdp=fsdp)
    return TrainStep(jitted, donates=donate, warn=warn)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepOptions:
    """The options of a train step, checked once, and the step that follows from them.

    Attributes:
      policy, has_aux, microbatches, cast, extra_args, fsdp, recompute, gradients,
        count_overflows, histograms_every: as for `make_train_step`.
    """

    policy: Any = None
    has_aux: bool = False
    microbatches: int = 1
    cast: Cast = "products"
    extra_args: Callable[..., Mapping[str, Any]] | None = None
    fsdp: FSDP | None = None
    recompute: Recompute = "loops"
    gradients: Gradients = "buffered"
    count_overflows: bool = False
    histograms_every: int | None = None

    def __post_init__(self) -> None:
        if model_casts(self.policy) and self.cast != "products":
            raise ValueError(
                f"cast={self.cast!r} and policy='none' contradict each other: who casts?"
            )
        if self.policy is not None and not model_casts(self.policy):
            get_rules(self.policy)  # an unknown one is an error here, and not in the first step
        check_fsdp(self.fsdp)
        check_recompute(self.recompute)
        check_option("cast", self.cast, Cast)
        check_microbatches(self.microbatches)
        check_histograms_every(self.histograms_every)
        check_option("gradients", self.gradients, Gradients)
        if self.gradients == "released" and self.microbatches > 1:
            raise ValueError(
                "gradients='released' updates layers in the backward pass of one batch, and "
                f"microbatches={self.microbatches} adds up the gradients of several. Choose one of "
                "the two"
            )
        if self.gradients == "released" and self.histograms_every is not None:
            raise ValueError(
                "gradients='released' keeps no gradients, and "
                f"histograms_every={self.histograms_every} counts all of them. Choose one of the "
                "two"
            )

    def released(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step that keeps no gradients, if these options say so."""
        return release_gradients(step) if self.gradients == "released" else step

    def step(
        self, loss_fn: Callable[..., Any], under_rules: LossUnderRules | None = None
    ) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]:
        """Returns one step, not jitted; `under_rules` returns a loss of modules under rules."""
        if not callable(loss_fn):
            raise TypeError(f"make_train_step takes a loss function, got {type(loss_fn).__name__}")

        def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            rules = rules_of_step(self.policy, state.tx)
            lowered = lowered_loss(loss_fn, rules, self.cast, self.recompute, under_rules)
            loss_and_rest = _with_collections(lowered, self.has_aux)
            options = _options_of_step(state, self.microbatches, self.fsdp)
            # What runs under one policy runs under all: a reduction is on automatic axes by itself.
            free = loss_and_rest if options.reduction else on_automatic_axes_inside(loss_and_rest)
            evaluate_batch = _evaluation_of_batch(free, options)
            operands = batch, state.collections, options.loss_scale
            collections, (loss, grads, aux) = evaluate_batch(state.params, *operands)
            norm = optax.tree.norm(split_floats(grads)[0])
            # The norm is finite only if all gradients are, and then Adam's squares of them do not
            # overflow. An infinite loss destroys the state of optimizers that read it.
            finite = all_finite((loss, norm)) & stays_finite(collections, state.collections)
            extra = {} if self.extra_args is None else dict(self.extra_args(state, batch, loss))
            value = Evaluation(loss, grads, ())
            value_fn = value_function(evaluate_batch, state.params, operands, value)
            line_search = {"value": loss, "grad": grads, "value_fn": value_fn}
            # Some optimizers take less: one calls its first argument `grad`, and another goes
            # through `jit`, which takes no functions.
            offers = [line_search | extra, {"value": loss} | extra, extra]
            new = step_with_first_offer(state, grads, offers, finite, collections)
            metrics = {"loss": loss, "grad_norm": norm} | step_metrics(state, new)
            counts, every = self.count_overflows, self.histograms_every
            metrics |= gradient_metrics(grads, finite, state, counts, every)
            return new, metrics | ({"aux": aux} if self.has_aux else {})

        return train_step


def _with_collections(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns a loss that takes all collections, and returns them all, changed or not."""

    def loss_and_rest(params: PyTree, batch: PyTree, collections: dict[str, PyTree]) -> Any:
        out = loss_fn(params, batch, **collections)
        loss, changed, aux = unpack(out, bool(collections), has_aux)
        return loss, (update_collections(collections, changed), aux)

    return loss_and_rest


def check_takes(loss_fn: Callable[..., Any], form: str, *args: Any, **kwargs: Any) -> None:
    """Raises TypeError if a loss function does not take these arguments, written as `form`."""
    with contextlib.suppress(ValueError):  # of a builtin, whose signature is unknown
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"a step calls its loss function as loss_fn{form}, which this one does not take: "
                f"{error}"
            ) from None


def _options_of_step(state: TrainState, microbatches: int, fsdp: FSDP | None) -> GradientOptions:
    # A policy that does not name float16 has no loss scale. A loss that computes in it all the same
    # then gets a warning, which a scale of 1 would silence.
    scales = not isinstance(state.tx.loss_scale, NoLossScale)
    scales = scales or jnp.dtype(jnp.float16) in dtypes_of(state.tx.rules)
    return GradientOptions(
        has_aux=True,
        loss_scale=state.loss_scale if scales else None,
        microbatches=microbatches,
        reduction=_reduction(state.tx.rules, fsdp),
    )


def _evaluation_of_batch(
    fun: Callable[..., Any], options: GradientOptions
) -> Callable[[PyTree, PyTree, Any, Any], tuple[Any, Evaluation]]:
    """Returns a function of params, batch, collections and loss scale; it adds microbatches up."""

    def evaluate_batch(
        params: PyTree, batch: PyTree, first: Any, scale: Any
    ) -> tuple[Any, Evaluation]:
        scaled = dataclasses.replace(options, loss_scale=scale)
        evaluate = scaled_evaluation(fun, (0,), scaled)

        def evaluate_part(collections: Any, part: PyTree) -> tuple[Any, Evaluation]:
            loss, (grads,), (new, aux) = evaluate(params, part, collections)
            new = jax.tree.map(on_axes_of, new, collections)
            return new, Evaluation(loss, grads, aux)

        return sum_over_microbatches(evaluate_part, first, params, batch, options.microbatches)

    return evaluate_batch


def _reduction(rules: PolicyRules, fsdp: FSDP | None) -> GradientReduction | None:
    """Returns how to reduce gradients under rules: in their widest dtype, at most float32."""
    # What computes in 32 bits has float32 gradients by itself.
    narrow = [policy for policy in all_policies(rules) if policy.compute_dtype.itemsize < 4]
    if not narrow:
        return gradient_reduction(None, fsdp)
    widest = max((policy.reduce_dtype for policy in narrow), key=lambda dtype: dtype.itemsize)
    return gradient_reduction(jnp.float32 if widest.itemsize > 4 else widest, fsdp)


def _check_shardings(shardings: PyTree, state: TrainState) -> None:
    """Raises ValueError if these are no shardings of a state with this optimizer."""

    # Before JAX does, whose error would name `pjit out_shardings` and types of nodes.
    def is_sharding(x: Any) -> bool:
        return x is None or isinstance(x, (jax.P, jax.sharding.Sharding))

    if isinstance(shardings, TrainState) and shardings.tx != state.tx:
        raise ValueError(
            "the shardings were made of a state with another optimizer: make both states with the "
            "same tx, which jaxmp.mixed_precision returned once"
        )
    try:
        jax.tree.broadcast(shardings, state, is_leaf=is_sharding)
    except ValueError as error:
        reason = f": {error}" if isinstance(shardings, TrainState) else ""
        raise ValueError(
            "shardings must be those of the whole state, jaxmp.sharding.state_shardings(state, "
            f"params), or a prefix of such a tree, got a {type(shardings).__name__} (those of the "
            f"params alone belong into fsdp=FSDP(shardings=...)){reason}"
        ) from None


def unpack(out: Any, has_collections: bool, has_aux: bool) -> tuple[Any, dict[str, Any], Any]:
    form = ["loss", *["collections"] * has_collections, *["aux"] * has_aux]
    parts = (out,) if len(form) == 1 else out
    if not isinstance(parts, tuple) or len(parts) != len(form) or isinstance(parts[0], tuple):
        kind = jax.typeof(out) if isinstance(out, jax.Array) else f"a {type(out).__name__}"
        returned = f"a tuple of {len(out)}" if isinstance(out, tuple) else kind
        hint = "" if has_aux else ". For another output beside it, give has_aux=True"
        raise TypeError(
            f"the loss function must return ({', '.join(form)}) here, got {returned}{hint}"
        )
    loss, *others = parts
    changed = others[0] if has_collections else {}
    if not isinstance(changed, Mapping):
        raise TypeError(
            f"the collections that the loss function returns must be a dictionary by name, got "
            f"{type(changed).__name__}"
        )
    return loss, dict(changed), others[-1] if has_aux else None
