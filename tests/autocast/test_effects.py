"""Autocast and what is outside of a function: captured arrays, effects, lines, errors."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, UNIT, W, X, error
from tests.support.dots import count_dots, equations

pytestmark = pytest.mark.jax

both = pytest.mark.parametrize("policy", BOTH)


def same_bits(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# --- what a function holds ---------------------------------------


def test_captured_arrays_that_are_replaced() -> None:
    class Holder:
        w, s = W, jnp.float32(2.0)
        table = np.ones(16, np.float32)

    fast = jaxmp.autocast(lambda x: (x @ Holder.w) * Holder.s, BF16)
    first = fast(X)
    Holder.s = jnp.float32(4.0)
    same_bits(fast(X), first * 2)
    Holder.w = W * 2
    same_bits(fast(X), first * 4)


def test_captured_scalar_that_is_replaced() -> None:
    class Holder:
        rate = jnp.float32(0.5)

    fast = jaxmp.autocast(lambda x: x * Holder.rate, BF16)
    assert float(fast(jnp.ones(()))) == 0.5
    Holder.rate = jnp.float32(0.25)
    assert float(fast(jnp.ones(()))) == 0.25


def test_captured_numpy_array_that_is_changed_in_place() -> None:
    table = np.ones(16, np.float32)
    fast = jaxmp.autocast(lambda x: jnp.sum(x * table), BF16)
    assert float(fast(jnp.ones(16))) == 16
    table[:] = 2
    assert float(fast(jnp.ones(16))) == 32


def test_arrays_captured_by_a_nested_jit() -> None:
    class Holder:
        w = W

    def f(x: Any) -> Any:
        return jax.jit(lambda x: x @ Holder.w)(x)

    fast = jaxmp.autocast(f, BF16)
    first = fast(X)
    Holder.w = W * 2
    same_bits(fast(X), first * 2)


def test_eager_calls_are_traced_once() -> None:
    calls = itertools.count()

    def f(x: Any, w: Any, n: int) -> Any:
        next(calls)
        return x @ w * n

    fast = jaxmp.autocast(f, BF16)
    for _ in range(3):
        fast(X, W, 2)
    assert next(calls) == 1
    fast(X[:2], W, 2)
    fast(X, W, 3)
    assert next(calls) == 4


def test_arguments_are_not_donated() -> None:
    x = X + 0
    fast = jaxmp.autocast(lambda x, w: x @ w, BF16)
    fast(x, W)
    assert not x.is_deleted()
    donating = jax.jit(lambda x, w: x + fast(x, w), donate_argnums=0)
    want = x + fast(x, W)
    assert error(donating(x, W), want) < UNIT[BF16]
    assert x.is_deleted()


# --- effects -----------------------------------------------------


def test_callbacks_run_once_and_in_order(capsys: Any) -> None:
    seen: list[Any] = []

    def f(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda h: seen.append(("first", h.dtype)), x @ w, ordered=True)
        y = jax.pure_callback(
            lambda h: np.asarray(h) * 2, jax.ShapeDtypeStruct((4, 16), jnp.float32), x @ w
        )
        z = jax.experimental.io_callback(
            lambda h: seen.append(("second", h.dtype)) or np.float32(7),
            jax.ShapeDtypeStruct((), jnp.float32),
            jnp.tanh(x @ w),
            ordered=True,
        )
        jax.debug.print("seen {}", z, ordered=True)
        return y, z

    fast = jaxmp.autocast(f, BF16)
    for run in (fast, jax.jit(fast)):
        seen.clear()
        y, z = run(X, W)
        jax.effects_barrier()
        assert [name for name, _ in seen] == ["first", "second"]
        assert {dtype for _, dtype in seen} == {np.dtype("float32")}
        assert float(z) == 7
        assert error(y, 2 * (X @ W)) < 4 * UNIT[BF16]
        assert capsys.readouterr().out == "seen 7.0\n"


def test_callbacks_in_loops_and_branches() -> None:
    seen: list[int] = []

    def f(x: Any, w: Any) -> Any:
        def body(c: Any, i: Any) -> Any:
            jax.debug.callback(lambda i: seen.append(int(i)), i, ordered=True)
            c = lax.cond(i > 1, lambda c: c, lambda c: c @ w, c)
            return c @ w, None

        return lax.scan(body, x, jnp.arange(4))[0]

    assert error(jaxmp.autocast(f, BF16)(X, W), f(X, W)) < 24 * UNIT[BF16]
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3] * 2


REGIONS = {
    "jit": lambda body, h: jax.jit(body)(h),
    "checkpoint": lambda body, h: jax.checkpoint(body)(h),
    "cond": lambda body, h: lax.cond(jnp.sum(h) > -1e6, body, lambda h: h, h),
    "scan": lambda body, h: lax.scan(lambda h, _: (body(h), None), h, length=2)[0],
    "while": lambda body, h: lax.fori_loop(0, jnp.int32(1), lambda _, h: body(h), h),
    "layers": lambda body, h: lax.scan(jax.checkpoint(lambda h, _: (body(h), None)), h, length=2)[
        0
    ],
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("begins_as", ["activation", "embedding"])
def test_callbacks_that_read_a_stream(region: str, begins_as: str) -> None:
    """An operation without results, in every kind of region, of what may be 16 bits there."""
    seen: list[Any] = []

    def f(table: Any, w: Any, i: Any) -> Any:
        def body(h: Any) -> Any:
            jax.debug.callback(lambda h: seen.append(h), h)
            return h + jnp.tanh(h @ w)

        h = table[i]
        return REGIONS[region](body, h if begins_as == "embedding" else h @ w)

    args = X, W, jnp.arange(3)
    got = jaxmp.autocast(f, BF16)(*args)
    jax.effects_barrier()
    assert {h.dtype for h in seen} <= {np.dtype("float32"), np.dtype(jnp.bfloat16)}
    begun = X[:3] @ W if begins_as == "activation" else X[:3]
    assert min(error(h, begun) for h in seen) < 2 * UNIT[BF16]  # they come in any order
    assert error(got, f(*args)) < 24 * UNIT[BF16]


def test_mutable_arrays() -> None:
    def f(x: Any, w: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((4, 16)))
        ref[...] += x @ w
        ref[0] = jnp.tanh(ref[1])
        return ref[...]

    assert error(jaxmp.autocast(f, BF16)(X, W), f(X, W)) < 4 * UNIT[BF16]
    assert count_dots(jaxmp.autocast(f, BF16), X, W) == {"bfloat16": 1}

    counter = jax.new_ref(jnp.zeros((), jnp.int32))

    def g(x: Any, w: Any) -> Any:
        counter[...] += 1
        return x @ w

    fast = jax.jit(jaxmp.autocast(g, BF16))
    fast(X, W)
    fast(X, W)
    assert int(counter[...]) == 2
    eager = jaxmp.autocast(g, BF16)
    eager(X, W)
    eager(X, W)
    assert int(counter[...]) == 4


def test_mutable_array_that_is_an_argument() -> None:
    def f(ref: Any, x: Any, w: Any) -> Any:
        ref[...] = ref[...] + (x @ w)
        return ref[...].sum()

    total = jax.new_ref(jnp.zeros((4, 16)))
    jax.jit(jaxmp.autocast(f, BF16))(total, X, W)
    assert error(total[...], X @ W) < 4 * UNIT[BF16]


def test_source_lines_and_name_stacks() -> None:
    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("block"), jax.named_scope("inner"):
            return jnp.tanh(x @ w)  # this line

    def of(fun: Any) -> dict[str, Any]:
        jaxpr = jax.make_jaxpr(fun)(X, W)
        found = {e.primitive.name: e for e in equations(jaxpr)}
        return {name: found[name].source_info for name in ("dot_general", "tanh")}

    plain, fast = of(f), of(jaxmp.autocast(f, BF16))
    for name, info in plain.items():
        line = jax.extend.source_info_util
        assert str(fast[name].name_stack).endswith(str(info.name_stack))
        frames = [
            next(iter(fr.line_num for fr in i.traceback.frames if fr.file_name == __file__))
            for i in (info, fast[name])
        ]
        assert frames[0] == frames[1]
        assert line is not None


@pytest.mark.exhaustive
def test_no_tracer_leaks() -> None:
    def f(x: Any, ws: Any) -> Any:
        return lax.scan(jax.checkpoint(lambda c, w: (jax.nn.relu(c @ w), None)), x, ws)[0].sum()

    with jax.checking_leaks():
        jax.grad(jaxmp.autocast(f, BF16))(X, jnp.stack([W, W]))


def test_errors_in_the_function_come_through() -> None:
    def f(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jaxmp.autocast(f, BF16)(X)
    with pytest.raises(TypeError, match="contracting"):
        jaxmp.autocast(lambda x: x @ jnp.ones((3, 3)), BF16)(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jaxmp.autocast(lambda x: x if x.sum() > 0 else -x, BF16)(X)
