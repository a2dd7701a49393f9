"""Rules that several primitives share: running alone, zero tangents, batches, checkpoints."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, partial_eval


def compile_alone(primitive: Primitive) -> None:
    """Makes a primitive that runs outside of `jit` a program of its own, once for its params."""

    @functools.lru_cache(maxsize=4096)
    def compiled(params: tuple[tuple[str, Any], ...]) -> Any:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    def run(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # where jit is disabled, this would call itself
            return compiled(tuple(params.items()))(*args)

    primitive.def_impl(run)


def zero_tangent(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def without_derivative(primitive: Primitive) -> None:
    """Gives a primitive zero tangents, as another equation has its derivative."""

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        return out, jax.tree.map(zero_tangent, out)

    ad.primitive_jvps[primitive] = jvp
    # Transposed where it reads a linear value all the same, as under `jax.linear_transpose`.
    ad.primitive_transposes[primitive] = lambda ct, *args, **params: [None] * len(args)


def batch_size(args: Sequence[Any], axes: Sequence[int | None]) -> int:
    """Returns the size of the batch that `vmap` adds to the operands of an equation."""
    return next(x.shape[i] for x, i in zip(args, axes, strict=True) if i is not None)


def batch_in_front(args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Returns operands that all have their batch along the first axis."""
    size = batch_size(args, axes)
    return [batching.bdim_at_front(x, i, size) for x, i in zip(args, axes, strict=True)]


def never_saved(primitive: Primitive) -> None:
    """Makes checkpoints compute a primitive again, whatever their policy says."""
    # JAX rounds what a policy saves with `reduce_precision`, which knows only formats with
    # infinities: of float8_e4m3fn, codes above 240 would become NaN (jax 0.10 and 0.12). What the
    # codes are rounded from is saved instead.
    rules: dict[Primitive, Callable[..., Any]] = partial_eval.partial_eval_jaxpr_custom_rules
    rules[primitive] = _recompute


def _recompute(
    saveable: Any, unknown: Sequence[bool], at_hand: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """The rule: which of two programs runs an equation, and which values the second one gets."""
    del saveable
    inputs = zip(equation.invars, at_hand, strict=True)
    residuals = [x for x, is_there in inputs if not (is_there or isinstance(x, Literal))]
    count = len(equation.outvars)
    first = None if any(unknown) else equation
    return first, equation, [first is None] * count, [True] * count, residuals
