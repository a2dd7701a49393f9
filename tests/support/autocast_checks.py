"""One check for every construct: autocast gives what float32 gives, to its dtype's roundings."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from tests.support.dots import count_dots, equations

BF16, FP16 = "mixed_bfloat16", "mixed_float16"
BOTH = (BF16, FP16)
both = pytest.mark.parametrize("policy", BOTH)
# The largest relative error of one rounding.
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11}
LOW = {BF16: "bfloat16", FP16: "float16"}


def rows(*shape: int, seed: int = 0) -> jax.Array:
    """Random numbers of variance one."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))


def weights(*shape: int, seed: int = 1) -> jax.Array:
    """Random weights that keep the variance of what they multiply."""
    return jax.device_put(np.asarray(rows(*shape, seed=seed)) / np.float32(shape[-2]) ** 0.5)


# No number of their product is near zero, where 16 bits may have another sign.
X, W = rows(4, 16), weights(16, 16, seed=216)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def gradient_inside(policy: str) -> contextlib.AbstractContextManager[Any]:
    """Expects the warning of a float16 gradient without a loss scale, inside of a function."""
    if policy == FP16:
        return pytest.warns(UserWarning, match="computed in float16 without a loss scale")
    return contextlib.nullcontext()


def compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    """As `jax.jit`, for functions that run once: most of a test's time is XLA's optimizer."""
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def results_of(name: str, fun: Callable[..., Any], *args: Any, policy: str = BF16) -> list[str]:
    """The dtypes that the first operation of a name returns, in a program under autocast."""
    closed = jax.make_jaxpr(jaxmp.autocast(fun, policy))(*args)
    op = next(each for each in equations(closed) if each.primitive.name == name)
    return [str(variable.aval.dtype) for variable in op.outvars]


def types(tree: Any) -> list[Any]:
    """Shape and dtype of each array, type and value of what is none."""
    return [
        (x.shape, str(x.dtype)) if hasattr(x, "dtype") else (type(x), x)
        for x in jax.tree.leaves(tree)
    ]


def same_bits(got: Any, want: Any) -> None:
    """Fails if numbers or dtypes of two trees differ; NaN is equal to itself."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def error(got: Any, want: Any) -> float:
    """The largest error of a tree, relative to the largest number of each array; inf for NaN."""
    largest = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not hasattr(b, "dtype"):
            continue
        if not is_float(b):
            if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            largest = max(largest, 0.0 if np.array_equal(a, b) else np.inf)
        elif b.size:
            wide = np.complex128 if jnp.iscomplexobj(b) else np.float64
            a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            assert np.isfinite(b).all(), "the reference is not finite: a bad case"
            scale = max(float(np.abs(b).max()), 1e-30)
            each = float(np.abs(a - b).max()) / scale
            largest = max(largest, each if np.isfinite(each) else np.inf)
    return largest


def scalar(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A loss to differentiate: every number that a function returns, each with its own weight."""

    def loss(*args: Any) -> Any:
        out = fun(*args)
        total = jnp.zeros(())
        for leaf in jax.tree.leaves(out):
            if is_float(leaf):
                real = jnp.real(leaf).astype(jnp.float32)
                signs = np.cos(np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape)
                total = total + jnp.sum(real * signs)
        return total, out

    return loss


def dtypes_of(counts: dict[str, int], low: str) -> dict[str, int]:
    """Counts as `count_dots` gives them, for counts of which one is called "low"."""
    return {low if key == "low" else key: count for key, count in counts.items() if count}


def check(
    fun: Callable[..., Any],
    *args: Any,
    policy: str = BF16,
    dots: dict[str, int] | None = None,
    grad_dots: dict[str, int] | None = None,
    roundings: float = 8.0,
    grad_roundings: float | None = None,
    argnums: Iterable[int] | None = None,
    **options: Any,
) -> Any:
    """Runs a function under autocast, with its gradients if it has any, and compares to float32.

    Args:
      fun: the function.
      *args: its arguments, at shapes where each rounding counts.
      policy: the policy.
      dots: how many products of which dtype it has; "low" for that of the policy.
      grad_dots: the same for its gradient; without it, all have to be low if those of `dots` are.
      roundings: how many roundings, each at its worst, the result may be away from float32.
      grad_roundings: the same for gradients; twice as many without it.
      argnums: by which arguments to differentiate; by all floats without it.
      **options: those of autocast.

    Returns:
      What the function returned under autocast.
    """
    cast = jaxmp.autocast(fun, policy, **options)
    if argnums is None:
        argnums = [i for i, x in enumerate(args) if all(map(is_float, jax.tree.leaves(x)))]
    argnums = tuple(argnums)
    unit, low = UNIT[policy], LOW[policy]
    if dots is not None:
        assert count_dots(cast, *args) == dtypes_of(dots, low)
    if not argnums:
        got, want = compiled(lambda *args: (cast(*args), fun(*args)))(*args)
    else:
        gradients = lambda f: jax.value_and_grad(scalar(f), argnums, has_aux=True)  # noqa: E731
        run = compiled(lambda *args: (gradients(cast)(*args), gradients(fun)(*args)))
        ((_, got), grads), ((_, want), want_grads) = run(*args)
        assert types(grads) == types(want_grads)
        bound = unit * (grad_roundings if grad_roundings is not None else 2 * roundings)
        assert error(grads, want_grads) <= bound
        found = count_dots(gradients(cast), *args)
        if grad_dots is not None:
            assert found == dtypes_of(grad_dots, low)
        elif dots is not None and set(dots) == {"low"}:
            assert set(found) == {low}
            assert found[low] > dots["low"]
    assert types(got) == types(want)
    assert error(got, want) <= unit * roundings
    return got
