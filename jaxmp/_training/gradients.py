"""`value_and_grad` and `grad` that scale the loss, unscale the gradients and hide both."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxmp._autocast.api import within_autocast
from jaxmp._autocast.regions import SCALED
from jaxmp._float32_reduction.api import gradient_reduction
from jaxmp._mesh.fsdp import FSDP
from jaxmp._numerics.dtypes import at_least_float32
from jaxmp._numerics.tree import check_arrays, check_differentiable, leaf_names, split_floats, widen
from jaxmp._numerics.user_warnings import warn
from jaxmp._program import compat
from jaxmp._program.facts import ForwardAnalysis, propagate
from jaxmp._program.mesh_axes import on_current_axes
from jaxmp._program.program import Op, equations_in, read
from jaxmp._recompute.api import Recompute, apply_recompute
from jaxmp._training.gradient_options import GradientKeywords, GradientOptions, LossScaleLike
from jaxmp._training.microbatch import Evaluation


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScaleLike = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduce_dtype: Any = None,
    fsdp: FSDP | None = None,
    recompute: Recompute = "never",
) -> Callable[..., Any]:
    """Differentiates like `jax.value_and_grad`; loss and gradients are unscaled float32.

    The caller can log the loss, clip the gradients and take their norm without knowing the scale.
    The loss is scaled in float32 (a float16 loss of 3 times 2**16 is infinite in float16). The
    unscaled loss is returned separately rather than divided back. Gradients are unscaled in float32
    with the same scale that multiplied the loss. A gradient that is not finite means that the
    low-precision computation overflowed; the loss is still right.

    Args:
      fun: a function that returns a scalar float loss, or `(loss, aux)`.
      argnums: which positional arguments to differentiate: trees of arrays. Integer leaves, such as
        frozen 8-bit weights, have gradients of dtype float0, as from `jax.grad` with `allow_int`.
      has_aux: whether `fun` returns `(loss, aux)`.
      loss_scale: the scale to use: `opt_state.loss_scale`, a number, or None for no scaling. With
        None, a function that computes in float16 causes a warning; 1.0 causes none. The scale is
        fixed when `value_and_grad` is called, so call it inside the step, with the state of that
        step: a scale from outside would never change.
      microbatches: evaluate the batch in this many equal parts, one after the other, and average
        loss and gradients in float32. For a loss that is a mean over the batch this is the
        full-batch gradient, in the memory of one part. Each leaf of `aux` gains a leading axis
        of this length. Part `i` holds the examples `i, i + n, i + 2 n, ...`, so that a batch
        sharded over devices stays where it is (if `n` divides the share of each device). Typed
        PRNG keys in the batch are split; keyword arguments are not.
      batch_argnums: the positional arguments to split; by default all that are not in `argnums`.
      reduce_dtype: the dtype in which gradients are summed, over the batch and over the devices
        that share it. Plain JAX sums in the dtype to which the model casts a param: in bfloat16
        over 1,024 devices that is 3 % off. float32 makes each sum a float32 sum without changes to
        `fun`; None (or a 16-bit dtype) leaves the sums unchanged. `fun` is traced as under
        `jax.jit`: it cannot branch in Python on the values of JAX arrays. All arguments in
        `argnums` count as params: if the batch is one of them, arrays computed from it are kept in
        float32.
      fsdp: a `jaxmp.sharding.FSDP` with the shardings of the params, if they are split to save
        memory. Its shardings have the structure of the gradients.
      recompute: `"auto"` or `"always"` keeps fewer residuals, and recomputes cheap ones in the
        backward pass; see `jaxmp.recompute`. `fun` is then traced, as for `reduce_dtype`. Or a
        share of what JAX would keep, such as `0.2`, or a function that wraps `fun`.

    Returns:
      A function with the arguments of `fun` that returns `(loss, grads)`, or
      `((loss, aux), grads)`. The loss is float32 (or wider, if it was). The gradients have the
      structure of the argument. They are float32 where the argument is narrower, and have its dtype
      elsewhere.

    Raises:
      TypeError: if an argument to differentiate holds no float, or anything but numbers, or if the
        loss is not a float scalar.
      ValueError: if `microbatches` does not divide the batch, if arrays in the batch differ in
        their number of examples, or if a keyword argument looks like a part of the batch.

    >>> loss_fn = lambda w, x: jnp.mean((x * w) ** 2)
    >>> x = jnp.arange(4, dtype=jnp.float16)
    >>> loss, grad = value_and_grad(loss_fn, loss_scale=2.0**10)(jnp.float16(2.0), x)
    >>> loss, grad
    (Array(14., dtype=float32), Array(14., dtype=float32))
    """
    several = not isinstance(argnums, int)
    options = GradientOptions(
        argnums=argnums,
        several=several,
        has_aux=has_aux,
        loss_scale=loss_scale,
        microbatches=microbatches,
        batch_argnums=batch_argnums,
        reduction=gradient_reduction(reduce_dtype, fsdp, several),
    )
    fun = apply_recompute(fun, recompute)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        wrt = options.positions(len(args))
        for i in wrt:
            check_arrays(args[i], f"argument {i}")
            if not split_floats(args[i])[0] and jax.tree.leaves(args[i]):
                check_differentiable(args[i], f"argument {i}")
        evaluate = scaled_evaluation(functools.partial(fun, **kwargs), wrt, options)
        return options.result(options.over_microbatches(evaluate, args, wrt, whole=kwargs))

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[GradientKeywords],
) -> Callable[..., Any]:
    """Differentiates like `value_and_grad`, but does not return the value; see there.

    Args:
      fun: a function that returns a scalar float loss, or `(loss, aux)`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      **options: the keyword arguments of `value_and_grad`.

    Returns:
      A function that returns `grads`, or `(grads, aux)`.

    >>> grad(lambda w: w**2, loss_scale=8.0)(jnp.bfloat16(3.0))
    Array(6., dtype=float32)
    """
    return without_value(value_and_grad(fun, argnums, has_aux, **options), has_aux)


def without_value(value_and_grad_fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns a function that returns the gradients without the value, or `(grads, aux)`."""

    @functools.wraps(value_and_grad_fun, updated=())
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def scaled_evaluation(
    fun: Callable[..., Any],
    argnums: tuple[Any, ...],
    options: GradientOptions,
    transform: Callable[..., Any] | None = None,
) -> Callable[..., Evaluation]:
    """Evaluates loss and gradient under a scale; returns both unscaled and times their weight.

    `argnums` are positions, or what `transform` takes for them. It replaces `jax.grad` where
    arguments are not plain trees.
    """
    has_aux, state, reduction = options.has_aux, options.loss_scale, options.reduction

    # JAX names the function in errors.
    @functools.wraps(fun, assigned=("__name__", "__qualname__"), updated=())
    def scaled(*args: Any) -> tuple[Any, tuple[Any, Any]]:
        inside = state is not None and within_autocast()
        with jax.named_scope(SCALED) if inside else contextlib.nullcontext():
            out = fun(*args)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"with has_aux=True the loss function must return (loss, aux), got {type(out)}"
            )
        loss, aux = out if has_aux else (out, None)
        loss = _check_loss(loss, has_aux)
        # A float16 loss of 3, times 2**16, is infinite in float16.
        loss = loss.astype(at_least_float32(loss.dtype))
        # The weight of a microbatch multiplies the loss, and not the gradients: then the 16-bit
        # gradients inside the model are as large as with the full batch.
        if options.weight != 1.0:
            loss = loss * jnp.asarray(options.weight, loss.dtype)
        scale = jax.tree.map(on_current_axes, state)
        return (loss if scale is None else scale.scale_loss(loss)), (loss, aux)

    def evaluate(*args: Any) -> Evaluation:
        call: Callable[..., Any] = scaled
        if reduction is not None:
            call, args = reduction.rewrite(scaled, args, argnums)
        differentiated = transform or functools.partial(_gradient, scaled=state is not None)
        grads, (loss, aux) = differentiated(call, argnums=argnums, has_aux=True)(*args)
        # Gradients travel as they were scaled, and are unscaled after the sum.
        if reduction is not None:
            grads = reduction.constrain(grads)
        scale = jax.tree.map(on_current_axes, state)
        return Evaluation(loss, widen(grads) if scale is None else scale.unscale(grads), aux)

    return evaluate


def _gradient(
    fun: Callable[..., Any],
    *,
    argnums: tuple[int, ...],
    has_aux: Literal[True],
    scaled: bool,
) -> Callable[..., Any]:
    """Differentiates like `jax.grad`; skips integers, and warns of float16 if not `scaled`."""

    def gradient(*args: Any) -> Any:
        wrt = tuple(args[i] for i in argnums)
        floats, merged = split_floats(wrt)

        def of_floats(floats: list[Any]) -> Any:
            new = dict(zip(argnums, merged(floats, wrt), strict=True))
            return fun(*[new.get(i, arg) for i, arg in enumerate(args)])

        # `jax.vjp` in place of `jax.grad`: the backward pass can be read before it runs.
        loss, backward, aux = jax.vjp(of_floats, floats, has_aux=has_aux)
        if not scaled:
            _warn_of_float16_products(backward, loss, wrt)
        (grads,) = backward(jnp.ones_like(loss))
        # Integers, such as frozen 8-bit weights, get float0 as from `jax.grad` with `allow_int`.
        integers = jax.tree.map(lambda x: np.zeros(jnp.shape(x), jax.dtypes.float0), wrt)
        return merged(grads, integers), aux

    return gradient


def _warn_of_float16_products(backward: Any, loss: Any, wrt: tuple[PyTree, ...]) -> None:
    # This first test, of residuals and of programs in checkpoints, costs nothing. It does not see
    # casts that only the backward pass of a `custom_vjp` makes.
    residual_dtypes = {jnp.result_type(x) for x in jax.tree.leaves(backward)}
    if _FLOAT16 not in residual_dtypes and not _make_float16([compat.linear_program(backward)]):
        return
    try:
        closed = jax.make_jaxpr(backward)(jnp.ones_like(loss))
    except Exception:  # any exception: without `jit`, a `custom_vjp` may need concrete values
        return
    if _leads_through_float16(closed):
        warn_of_float16(leaf_names(wrt[0] if len(wrt) == 1 else wrt))


_FLOAT16 = jnp.dtype(jnp.float16)


def _make_float16(jaxprs: Sequence[Any]) -> bool:
    results = (atom for equation in equations_in(jaxprs) for atom in equation.outvars)
    return any(getattr(atom.aval, "dtype", None) == _FLOAT16 for atom in results)


def _leads_through_float16(jaxpr: Any) -> bool:
    """Whether a gradient, the first argument of a backward pass, is float16 on its way."""
    # Only gradients count: data may be float16, also where a checkpoint computes it again.
    through_float16 = False

    def keep(aval: Any, of_gradient: bool) -> bool:
        nonlocal through_float16
        # A reference may hold a gradient that was written into it before.
        of_gradient = of_gradient or hasattr(aval, "inner_aval")
        through_float16 |= of_gradient and getattr(aval, "dtype", None) == _FLOAT16
        return of_gradient

    def rule(op: Op, of_gradient: Sequence[bool]) -> list[bool]:
        nonlocal through_float16
        # Gradients are not followed inside kernels: any float16 in there counts.
        through_float16 |= any(of_gradient) and _make_float16(compat.sub_jaxprs(op.equation))
        return [any(of_gradient)] * len(op.outputs)

    analysis = ForwardAnalysis(bottom=False, join=operator.or_, transfer=rule, restrict=keep)
    program = read(jaxpr)
    of_gradient = [i == 0 for i in range(len(program.inputs))]
    propagate(program, of_gradient, analysis)
    return through_float16


def warn_of_float16(names: list[str]) -> None:
    """Warns that gradients of the named params are computed in float16 without a scale."""
    # 6e-8 is the smallest number above zero in float16.
    text = ", ".join(map(repr, names[:3])) + ", ..." * (len(names) > 3)
    of = f" of {text}" if names[0] not in ("", "(root)") else ""
    warn(
        f"gradients{of} pass through float16 without a loss scale: numbers smaller than "
        "6e-8 become zero, and training may stand still. Give value_and_grad "
        "loss_scale=opt_state.loss_scale (or loss_scale=1.0, if none is wanted)"
    )


def _check_loss(loss: Any, has_aux: bool) -> Float[Array, ""]:
    hint = "" if has_aux else ". If the function returns (loss, aux), give has_aux=True"
    if isinstance(loss, (tuple, list, dict)) or loss is None:
        raise TypeError(f"the loss must be a float scalar, got a {type(loss).__name__}{hint}")
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            f"the loss must be a float scalar, got {jnp.result_type(loss)}"
            f"{list(jnp.shape(loss))}. Take a mean or a sum over the batch"
        )
    return jnp.asarray(loss)
