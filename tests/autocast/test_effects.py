"""Autocast and what is outside of a function: captured arrays, effects, lines, errors."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, UNIT, W, X, error, rows, same_bits, weights
from tests.support.dots import count_dots, equations

pytestmark = pytest.mark.jax

# --- what a function holds ---------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_captured_arrays_that_are_replaced(wrap: Any) -> None:
    class Holder:
        w, s = W, jnp.float32(2.0)

    fast = jaxmp.autocast(lambda x: wrap(lambda x: (x @ Holder.w) * Holder.s)(x), BF16)
    first = fast(X)
    Holder.s = jnp.float32(4.0)
    same_bits(fast(X), first * 2)
    Holder.w = W * 2
    same_bits(fast(X), first * 4)


def test_captured_numpy_array_that_is_changed_in_place() -> None:
    table = np.ones(16, np.float32)
    fast = jaxmp.autocast(lambda x: jnp.sum(x * table), BF16)
    ones = np.ones(16, np.float32)
    assert float(fast(ones)) == 16
    table[:] = 2
    assert float(fast(ones)) == 32


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


RATE: Any = np.float32(2)  # a number of a module, which a test replaces

NUMBERS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "int": int,
    "bool": lambda x: x > 2,
    "numpy scalar": np.float32,
    "float64": np.float64,
    "array of rank 0": lambda x: np.array(x, np.float16),
    "in a list": lambda x: [[np.float32(x)]],
    "in a dictionary": lambda x: {"rate": (x,)},
    "in a small array": lambda x: np.array([1, x]),
}


@pytest.mark.parametrize("wrap", [lambda f: jaxmp.autocast(f, BF16), jaxmp.recompute])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_a_function_closes_over_are_read_anew(name: str, wrap: Any) -> None:
    value, calls = NUMBERS[name](2), itertools.count()

    def f(x: Any) -> Any:
        next(calls)
        last = value[-1] if isinstance(value, np.ndarray) and value.ndim else value
        rate = jax.tree.leaves(last)[0]
        return jnp.sum(x * jnp.asarray(rate, x.dtype))

    wrapped, ones = wrap(f), np.ones(4, np.float32)
    assert [float(wrapped(ones)) for _ in range(3)] == [float(f(ones))] * 3
    assert next(calls) == 1 + 1  # the control: one trace, and the call above
    value = NUMBERS[name](3)
    assert float(wrapped(ones)) == float(f(ones))
    value = NUMBERS[name](2)
    assert float(wrapped(ones)) == float(f(ones))


def test_a_shape_of_a_held_array_is_read_anew() -> None:
    """Arrays of the same bytes."""
    held = np.zeros((2, 3))
    fast = jaxmp.autocast(lambda x: x * held.shape[0], BF16)
    assert fast(jnp.ones(())) == 2
    held = held.reshape(3, 2)
    assert fast(jnp.ones(())) == 3


def test_numbers_of_the_module_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a helper names, and a function inside of it."""

    def f(x: Any) -> Any:
        return lax.map(lambda row: scaled(row), x).sum()

    fast = jaxmp.autocast(f, BF16)
    ones = np.ones((2, 2), np.float32)
    assert float(fast(ones)) == 8
    monkeypatch.setattr(sys.modules[__name__], "RATE", 3)
    assert float(fast(ones)) == 12


def scaled(x: Any) -> Any:
    return x * RATE


def test_a_function_that_counts_its_traces_is_traced_once() -> None:
    count = 0

    def f(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * 2

    fast = jaxmp.autocast(f, BF16)
    for _ in range(3):
        fast(X)
    assert count == 1


def test_arguments_are_not_donated() -> None:
    x = X + 0
    fast = jaxmp.autocast(lambda x, w: x @ w, BF16)
    fast(x, W)
    assert not x.is_deleted()
    donating = jax.jit(lambda x, w: x + fast(x, w), donate_argnums=0)
    want = x + fast(x, W)
    assert error(donating(x, W), want) < UNIT[BF16]
    assert x.is_deleted()


# --- what readers of programs see ---------------------------------

OURS = {"held", "float32_gradient", "low_precision_product", "gradient_of", "open_rounding"}
WS = jax.device_put(np.stack([W, W]))
KERNEL = weights(3, 3, 4, 4)
EVALUATED: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "mlp": (lambda w, x: jnp.tanh(x @ w) @ w, W, X),
    "attention": (lambda w, x: jax.nn.softmax((x @ w) @ (x @ w.T).T) @ x, W, X),
    "convolution": (
        lambda w, x: lax.conv(x, w, (1, 1), "SAME"),
        np.transpose(KERNEL, (2, 3, 0, 1)),
        rows(2, 4, 6, 6),
    ),
    "experts": (lambda w, x: lax.ragged_dot(x, w, jnp.array([1, 3])), WS, X[:4]),
    "layers": (lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], WS, X),
    "one layer again": (lambda w, x: lax.fori_loop(0, 3, lambda _, h: jnp.sin(h @ w), x), W, X),
    "jit and checkpoint": (jax.checkpoint(jax.jit(lambda w, x: jnp.sin(x @ w))), W, X),
    "vmap": (jax.vmap(lambda w, x: x @ w, (None, 0)), W, X),
}


def names_in(function: Any, *args: Any) -> set[str]:
    return {e.primitive.name for e in equations(jax.make_jaxpr(function)(*args))}


@pytest.mark.parametrize("name", EVALUATED)
def test_a_function_that_is_evaluated_has_primitives_of_jax_alone(name: str) -> None:
    """Exporters read jaxprs, and know no others."""
    f, w, x = EVALUATED[name]
    fast = jaxmp.autocast(f, BF16)
    assert not OURS & names_in(fast, w, x)
    assert not OURS & names_in(lambda x: fast(w, x), x)
    if name != "experts":  # JAX has no batches of it
        assert not OURS & names_in(jax.jit(jax.vmap(fast, (None, 0))), w, np.stack([x, x]))
    gradient = jax.grad(lambda w: jnp.sum(fast(w, x)))
    assert "low_precision_product" in names_in(gradient, w)  # the control


@pytest.mark.parametrize("name", EVALUATED)
def test_derivatives_are_the_same_in_either_form(name: str) -> None:
    """Of a program that jaxmp reads, and of a program that JAX traced without a derivative."""
    f, w, x = EVALUATED[name]
    fast = jaxmp.autocast(lambda w, x: jnp.mean(f(w, x) ** 2), BF16)
    forms = (fast, jax.jit(fast), jax.checkpoint(fast), jaxmp.recompute(fast))
    gradients = [jax.jit(jax.grad(form))(w, x) for form in forms]
    for other in gradients[1:]:
        assert error(other, gradients[0]) < UNIT[BF16]
    dots = [count_dots(jax.grad(form), w, x) for form in forms[:2]]
    assert dots[0] == dots[1]
    _, forward = jax.jit(lambda w: jax.jvp(lambda w: fast(w, x), (w,), (w,)))(w)
    assert error(forward, np.vdot(gradients[0], w)) < 4 * UNIT[BF16]


def test_products_are_saved_by_the_policies_of_jax() -> None:
    """But for products that return float32, which JAX's policies do not know."""
    f, w, x = EVALUATED["mlp"]
    fast = jaxmp.autocast(lambda w, x: jnp.mean(jax.nn.softmax(f(w, x)) ** 2), BF16)
    dots = [
        count_dots(jax.grad(jax.checkpoint(fast, policy=policy)), w, x)
        for policy in (jax.checkpoint_policies.dots_saveable, None)
    ]
    assert sum(dots[0].values()) == sum(count_dots(jax.grad(fast), w, x).values())
    assert sum(dots[1].values()) > sum(dots[0].values())  # the control: it computes them again


def test_an_exported_function_has_no_calls_of_ours() -> None:
    f, w, x = EVALUATED["mlp"]
    fast = jaxmp.autocast(f, BF16)
    exported = jax.export.export(jax.jit(fast))(w, x)
    assert "custom_call" not in exported.mlir_module()
    same_bits(exported.call(w, x), jax.jit(fast)(w, x))


# --- effects -----------------------------------------------------


def test_callbacks_run_once_and_in_order(capsys: Any) -> None:
    seen: list[Any] = []

    # Of one kind: JAX keeps no order between `jax.debug.callback` and `io_callback`.
    def f(x: Any, w: Any) -> Any:
        note = lambda h: seen.append(("first", h.dtype))  # noqa: E731
        jax.experimental.io_callback(note, None, x @ w, ordered=True)
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

    args = X, W, np.arange(3)
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

    assert error(jaxmp.autocast(f, BF16)(X, W), jax.jit(f)(X, W)) < 4 * UNIT[BF16]
    assert count_dots(jaxmp.autocast(f, BF16), X, W) == {"bfloat16": 1}

    counter = jax.new_ref(jnp.int32(0))

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

    total = jax.new_ref(jax.device_put(np.zeros((4, 16), np.float32)))
    jax.jit(jaxmp.autocast(f, BF16))(total, X, W)
    assert error(total[...], X @ W) < 4 * UNIT[BF16]


def test_source_lines_and_name_stacks() -> None:
    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("block"), jax.named_scope("inner"):
            return jnp.tanh(x @ w)  # this line

    def of(fun: Any) -> dict[str, Any]:
        jaxpr = jax.make_jaxpr(fun)(X, W)
        found = {e.primitive.name: e for e in equations(jaxpr)}
        names = {"dot_general", "tanh", "custom_jvp_call"} & set(found)
        return {name: found[name].source_info for name in names}

    plain, fast = of(f), of(jaxmp.autocast(f, BF16))
    for name, info in plain.items():
        # A product is in a call, which has the scopes.
        stack = fast["custom_jvp_call" if name == "dot_general" else name].name_stack
        assert str(stack).endswith(str(info.name_stack))
        frames = [
            next(iter(fr.line_num for fr in i.traceback.frames if fr.file_name == __file__))
            for i in (info, fast[name])
        ]
        assert frames[0] == frames[1]


@pytest.mark.exhaustive
def test_no_tracer_leaks() -> None:
    def f(x: Any, ws: Any) -> Any:
        return lax.scan(jax.checkpoint(lambda c, w: (jax.nn.relu(c @ w), None)), x, ws)[0].sum()

    with jax.checking_leaks():
        jax.grad(jaxmp.autocast(f, BF16))(X, jnp.stack([W, W]))
