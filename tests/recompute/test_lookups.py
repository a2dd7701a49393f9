"""Lookups of one number in each row run by comparison: the same numbers, and no scatter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import jaxmp
from tests.support.dots import equations
from tests.support.recompute_checks import kept_bytes

SHAPE = (4, 6, 10)
NUMBERS = np.random.default_rng(0)
LOGITS = jnp.asarray(NUMBERS.normal(size=SHAPE), jnp.float32)
# Some are out of bounds, and some count from the end.
LABELS = jnp.asarray(NUMBERS.integers(-3, 12, size=SHAPE[:2]))


def at_labels(mode: str, **options: Any) -> Any:
    def pick(x: Any, labels: Any) -> Any:
        return x.at[jnp.arange(4)[:, None], jnp.arange(6), labels].get(mode=mode, **options)

    return pick


LOOKUPS = {
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "along the last axis": lambda x, i: jnp.take_along_axis(x, i[..., None], -1),
    "along the middle axis": lambda x, i: jnp.take_along_axis(x.mT, i[:, None], 1),
    "clipped": lambda x, i: jnp.take_along_axis(x, i[..., None], -1, mode="clip"),
    "bytes": lambda x, i: jnp.take_along_axis(x, i[..., None].astype(jnp.uint8), -1),
    "one axis": lambda x, i: x[0][jnp.arange(6), i[0]],
    "two axes": lambda x, i: x[jnp.arange(4)[:, None], jnp.arange(6), i],
    "other order": lambda x, i: x[jnp.arange(4), jnp.arange(6)[:, None], i.T],
    "numpy": lambda x, i: x[0][np.arange(6), i[0]],
    "filled": at_labels("fill", fill_value=7.0),
    "promised": at_labels("promise_in_bounds"),
    "vmap": lambda x, i: jax.vmap(jax.vmap(lambda row, label: row[label]))(x, i),
}
# Where a row is read twice, or in another order than its own, the sum of a scatter is needed.
OTHERS = {
    "two labels a row": lambda x, i: jnp.take_along_axis(x[0], i[:2].T, -1),
    "a table": lambda x, i: x[0, 0][i],
    "backwards": lambda x, i: x[0][5 - jnp.arange(6), i[0]],
    "fewer rows": lambda x, i: x[0][jnp.arange(5), i[0, :5]],
    "two labels": lambda x, i: x[0][i[0] % 6, i[0]],
    "the diagonal": lambda x, i: x[0][jnp.arange(6), jnp.arange(6)],
    "whole rows": lambda x, i: x[jnp.arange(4), i[:, 0]],
}


def pulled(fun: Any) -> Any:
    """The gradient of a sum in which all results have other weights."""

    def weighted(x: Any, labels: Any) -> Any:
        out = fun(x, labels)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return jax.grad(weighted)


def scatters(fun: Any, x: Any) -> list[int]:
    """How many numbers each scatter of a gradient changes."""
    found = equations(jax.make_jaxpr(pulled(fun))(x, LABELS))
    return [each.invars[2].aval.size for each in found if each.primitive.name == "scatter-add"]


def assert_same_bits(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    width = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(np.asarray(got).view(width), np.asarray(want).view(width))


@pytest.mark.parametrize("mode", ["loops", "auto", "always"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_same_numbers_without_scatters(name: str, mode: Any) -> None:
    fun = LOOKUPS[name]
    lean = jaxmp.recompute(fun, mode)
    assert_same_bits(jax.jit(lean)(LOGITS, LABELS), jax.jit(fun)(LOGITS, LABELS))
    got, want = (jax.jit(pulled(f))(LOGITS, LABELS) for f in (lean, fun))
    if name == "optax":  # the softmax beside it is computed again
        np.testing.assert_allclose(got, want, atol=1e-6)
    else:
        assert_same_bits(got, want)
    assert scatters(fun, LOGITS)  # positive control
    # `[..., 0]` of a result with one column stays a scatter of that column.
    assert len(scatters(lean, LOGITS)) == (name == "optax")


@pytest.mark.parametrize("name", OTHERS)
def test_other_gathers_stay(name: str) -> None:
    fun = OTHERS[name]
    lean = jaxmp.recompute(fun, "loops")
    assert scatters(lean, LOGITS) == scatters(fun, LOGITS) != []
    assert_same_bits(jax.jit(lean)(LOGITS, LABELS), jax.jit(fun)(LOGITS, LABELS))
    assert_same_bits(*(jax.jit(pulled(f))(LOGITS, LABELS) for f in (lean, fun)))


def pick(x: Any, labels: Any) -> Any:
    return x[jnp.arange(3), labels]


PICKS = jax.jit(pick), jax.jit(jaxmp.recompute(pick, "loops"))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32"])
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=12),
    labels=st.lists(st.integers(-4, 3), min_size=3, max_size=3),
)
def test_any_bits(dtype: str, bits: list[int], labels: list[int]) -> None:
    """Zeros keep their sign, numbers next to zero stay, infinities and NaN keep to their row."""
    width = f"u{jnp.dtype(dtype).itemsize}"
    x = np.array(bits, np.uint32).astype(width).view(jnp.dtype(dtype)).reshape(3, 4)
    x = np.where(np.isnan(x), np.nan, x).astype(dtype)  # which NaN it is stays open
    assert_same_bits(*(fun(x, np.array(labels)) for fun in PICKS))


def test_derivatives_of_all_kinds() -> None:
    """Forward mode, second derivatives, and batches."""

    def fun(x: Any) -> Any:
        return jnp.square(jnp.take_along_axis(x, LABELS[..., None] % 10, -1)).sum((1, 2))

    lean = jaxmp.recompute(fun, "loops")
    for kind in (jax.jacfwd, jax.jacrev, lambda f: jax.jacfwd(jax.jacrev(f)), jax.vmap):
        x = jnp.stack([LOGITS, -LOGITS]) if kind is jax.vmap else LOGITS
        np.testing.assert_array_equal(*(jax.jit(kind(f))(x) for f in (lean, fun)))


def test_the_backward_pass_keeps_labels_and_no_mask() -> None:
    def fun(x: Any) -> Any:
        return jnp.take_along_axis(x, LABELS[..., None], -1).sum()

    assert kept_bytes(jaxmp.recompute(fun, "loops"), LOGITS) <= 2 * LABELS.nbytes


def test_what_is_named_as_dear_stays_a_gather() -> None:
    fun = LOOKUPS["two axes"]
    assert scatters(jaxmp.recompute(fun, "loops", save=["gather"]), LOGITS)


def test_in_a_train_step() -> None:
    """The default of a step has it, under a policy, in a jitted function."""

    @jax.jit
    def loss(params: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(batch @ params, LABELS).mean()

    step = jaxmp.make_train_step(loss, "mixed_bfloat16")
    params, batch = jnp.ones((8, 10)), jnp.ones((4, 6, 8))
    state = jaxmp.TrainState.create(
        params=params, tx=jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    )
    found = equations(jax.make_jaxpr(step)(state, batch))
    sizes = [each.outvars[0].aval.size for each in found if each.primitive.name == "scatter-add"]
    assert max(sizes) <= LABELS.size
