"""Products of 16-bit operands with float32 gradients for their float32 sources."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmp._primitives.bilinear import bilinear_map
from jaxmp._primitives.mixed_product import product
from tests.support.compiled import after_partitioning
from tests.support.dots import equations
from tests.support.float8_references import error
from tests.support.reduction_checks import MESH

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Case:
    """A product, and its value and both gradients in NumPy."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    reference: Callable[..., Any]
    others: tuple[Any, ...] = ()


def dot(spec: str, *shapes: tuple[int, ...], swap: Any = None, **dims: Any) -> Case:
    """A `dot_general`; `spec` says in einsum's letters what it is."""
    lhs, rhs, out = re.split(",|->", spec)
    numbers = tuple(
        tuple(tuple(s.index(c) for c in dims.get(kind, "")) for s in (lhs, rhs))
        for kind in ("contract", "batch")
    )

    def reference(x: Any, w: Any, ct: Any) -> Any:
        return (
            np.einsum(spec, x, w),
            np.einsum(f"{out},{rhs}->{lhs}", ct, w),
            np.einsum(f"{lhs},{out}->{rhs}", x, ct),
        )

    return Case(lambda x, w: lax.dot_general(x, w, numbers), shapes, reference)


def conv(x: tuple[int, ...], w: tuple[int, ...], layout: Any, **options: Any) -> Case:
    """A convolution, with loops over every position of output and kernel as its reference."""
    strides, padding = options.get("window_strides", (1, 1)), options.get("padding", [(0, 0)] * 2)
    options = {"window_strides": strides, "padding": padding, **options}
    numbers = lax.conv_dimension_numbers(x, w, layout)

    def reference(x: Any, w: Any, ct: Any) -> Any:
        x, w, ct = (np.transpose(a, spec) for a, spec in zip((x, w, ct), numbers, strict=True))
        y, gx, gw = np.zeros_like(ct), np.zeros_like(x), np.zeros_like(w)
        groups = options.get("feature_group_count", 1)
        batches = options.get("batch_group_count", 1)
        lhs, rhs = options.get("lhs_dilation", (1, 1)), options.get("rhs_dilation", (1, 1))
        n, o, i = len(ct), len(w) // (groups * batches), w.shape[1]
        for p in itertools.product(*map(range, y.shape[2:])):
            for k in itertools.product(*map(range, w.shape[2:])):
                at = [p[d] * strides[d] + k[d] * rhs[d] - padding[d][0] for d in range(2)]
                q = tuple(a // lhs[d] for d, a in enumerate(at))
                if any(a % lhs[d] or not 0 <= q[d] < x.shape[2 + d] for d, a in enumerate(at)):
                    continue
                for g in range(groups * batches):
                    rows = slice((g % batches) * n, (g % batches + 1) * n)
                    channels = slice((g % groups) * i, (g % groups + 1) * i)
                    out = slice(g * o, (g + 1) * o)
                    xs, ws = x[rows, channels, *q], w[out, :, *k]
                    y[:, out, *p] += xs @ ws.T
                    gx[rows, channels, *q] += ct[:, out, *p] @ ws
                    gw[out, :, *k] += ct[:, out, *p].T @ xs
        back = [np.argsort(spec) for spec in numbers]
        return (np.transpose(a, s) for a, s in zip((y, gx, gw), (back[2], *back[:2]), strict=True))

    function = functools.partial(lax.conv_general_dilated, dimension_numbers=numbers, **options)
    return Case(function, (x, w), reference)


def ragged_reference(x: Any, w: Any, sizes: Any, ct: Any) -> Any:
    y, gx, gw, start = np.zeros_like(ct), np.zeros_like(x), np.zeros_like(w), 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], gx[rows] = x[rows] @ w[group], ct[rows] @ w[group].T
        gw[group], start = x[rows].T @ ct[rows], start + size
    return y, gx, gw


NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
CASES = {
    "matrix": dot("ab,bc->ac", (48, 16), (16, 8), contract="b"),
    "weight first": dot("ba,cb->ac", (16, 48), (8, 16), contract="b"),
    "batched": dot("gab,gbc->gac", (3, 40, 8), (3, 8, 6), contract="b", batch="g"),
    "permuted": dot("agdb,bcgd->gac", (40, 3, 2, 4), (4, 5, 3, 2), contract="bd", batch="g"),
    "vector": dot("ab,b->a", (64, 8), (8,), contract="b"),
    "outer": dot("a,b->ab", (40,), (6,)),
    "conv": conv((2, 9, 9, 3), (3, 3, 3, 4), NHWC, padding=[(1, 1), (1, 1)]),
    "conv strided": conv(
        (2, 9, 8, 3), (3, 2, 3, 4), NHWC, window_strides=(2, 3), padding=[(2, 0), (0, 1)]
    ),
    "conv dilated": conv((2, 4, 9, 9), (4, 4, 2, 3), NCHW, rhs_dilation=(2, 3)),
    "conv transposed": conv(
        (2, 5, 5, 3), (3, 3, 3, 4), NHWC, lhs_dilation=(2, 2), padding=[(1, 2), (2, 1)]
    ),
    "conv grouped": conv((2, 8, 8, 6), (3, 3, 2, 9), NHWC, feature_group_count=3),
    "conv depthwise": conv((2, 8, 8, 4), (3, 3, 1, 4), NHWC, feature_group_count=4),
    "conv batch groups": conv((4, 8, 8, 3), (3, 3, 3, 6), NHWC, batch_group_count=2),
    "conv odd layout": conv((9, 3, 8, 2), (3, 4, 3, 3), ("HCWN", "WOHI", "CWNH")),
    "ragged": Case(
        lax.ragged_dot, ((60, 8), (4, 8, 5)), ragged_reference, (np.int32([17, 0, 31, 12]),)
    ),
}
SMALL = ["matrix", "batched", "permuted", "conv strided", "conv grouped", "ragged"]
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
small_cases = pytest.mark.parametrize("case", [CASES[name] for name in SMALL], ids=SMALL)


def draw(case: Case, seed: int = 0, dtype: Any = jnp.bfloat16) -> list[Any]:
    """Float32 operands that are what their rounding is."""
    random = np.random.default_rng(seed)
    return [drawn(random, shape, dtype) for shape in case.shapes]


def drawn(random: np.random.Generator, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return jax.device_put((random.normal(size=shape) / 2).astype(dtype).astype(np.float32))


def low(case: Case, wide: str = "rhs", dtype: Any = jnp.bfloat16) -> Callable[..., Any]:
    """The product in 16 bits; `wide` tells which operands have float32 gradients, "" is plain."""

    def function(x: Any, w: Any) -> Any:
        structs = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (x, w)]
        (equation,) = jax.make_jaxpr(case.function)(*structs, *case.others).eqns
        params = {**equation.params, "preferred_element_type": jnp.dtype(dtype)}
        operands = [a.astype(dtype) for a in (x, w)]
        sources = [a if side in wide else None for a, side in ((x, "lhs"), (w, "rhs"))]
        return product(equation.primitive, params, [*operands, *case.others], sources)

    return function


def loss(case: Case, *args: Any) -> Callable[..., Any]:
    """Something with second derivatives by both operands."""
    function = low(case, *args) if args else lambda x, w: case.function(x, w, *case.others)
    return lambda x, w: jnp.sum(jnp.sin(function(x, w).astype(jnp.float32)))


def weighted(case: Case, wide: str) -> Callable[..., Any]:
    """A loss whose cotangents are numbers of 16 bits, so that no cast in it rounds."""

    def total(x: Any, w: Any) -> Any:
        y = low(case, wide)(x, w).astype(jnp.float32)
        return jnp.vdot(y, jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape) % 7 - 2.5)

    return total


def products(function: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """Dtypes of both operands and of the result, for every product in a program."""
    return [
        tuple(str(v.aval.dtype) for v in (*equation.invars[:2], equation.outvars[0]))
        for equation in equations(jax.make_jaxpr(function)(*args))
        if equation.primitive.name in PRODUCTS
    ]


@each_case
@pytest.mark.parametrize(
    ("dtype", "jit"),
    [(jnp.bfloat16, False), (jnp.float16, False), (jnp.bfloat16, True)],
    ids=["bfloat16", "float16", "jit"],
)
def test_values_and_gradients(case: Case, dtype: Any, jit: bool) -> None:
    x, w = draw(case, dtype=dtype)
    run = jax.jit if jit else lambda function: function
    y, pull = jax.vjp(run(low(case, "rhs", dtype)), x, w)
    ct = np.random.default_rng(1).normal(size=y.shape).astype(dtype)
    args = [np.asarray(a, np.float64) for a in (x, w)]
    y64, gx64, gw64 = case.reference(*args, *case.others, np.asarray(ct, np.float64))
    gx, gw = run(pull)(ct)
    assert (y.dtype, gx.dtype, gw.dtype) == (dtype, jnp.float32, jnp.float32)
    assert error(y, y64) < 1e-2
    assert error(gx, gx64) < 1e-2
    assert error(gw, gw64) < 1e-6

    plain, pull = jax.vjp(run(low(case, "", dtype)), x, w)
    assert np.array_equal(np.asarray(y), np.asarray(plain))
    if not jit:  # positive control; in one program XLA:CPU leaves the rounding out
        assert error(pull(ct)[1], gw64) > 5e-5


@small_cases
@pytest.mark.parametrize("wide", ["lhs", "rhs", "lhs rhs"])
def test_either_operand_can_have_a_source(case: Case, wide: str) -> None:
    x, w = draw(case)
    y, pull = jax.vjp(low(case, wide), x, w)
    ct = np.random.default_rng(1).normal(size=y.shape).astype(y.dtype)
    args = [np.asarray(a, np.float64) for a in (x, w)]
    _, *want = case.reference(*args, *case.others, np.asarray(ct, np.float64))
    for got, want64, side in zip(pull(ct), want, ("lhs", "rhs"), strict=True):
        assert (error(got, want64) < 1e-6) == (side in wide)


def test_one_array_twice() -> None:
    x = drawn(np.random.default_rng(0), (24, 8))
    gram = dot("ab,cb->ac", (24, 8), (24, 8), contract="b")
    ct = np.random.default_rng(1).normal(size=(24, 24)).astype(jnp.bfloat16)
    ct64, x64 = np.asarray(ct, np.float64), np.asarray(x, np.float64)
    for wide, good in (("lhs rhs", True), ("", False)):
        got = jax.vjp(lambda x, wide=wide: low(gram, wide)(x, x), x)[1](ct)[0]
        assert (error(got, (ct64 + ct64.T) @ x64) < 1e-6) == good


@each_case
@pytest.mark.parametrize("wide", ["lhs", "rhs", "lhs rhs"])
def test_dtypes_of_products(case: Case, wide: str) -> None:
    """All operands have 16 bits; what a float32 source gets is float32 from the product on."""
    x, w = draw(case)
    gradient = jax.value_and_grad(loss(case, wide), (0, 1))
    found = products(gradient, x, w)
    b = "bfloat16"
    sources = len(wide.split())
    assert sorted(found) == sorted([(b, b, b)] * (3 - sources) + [(b, b, "float32")] * sources)
    plain = products(jax.value_and_grad(loss(case, ""), (0, 1)), x, w)
    assert plain == [(b, b, b)] * 3  # positive control
    full = products(jax.value_and_grad(loss(case), (0, 1)), x, w)
    assert full == [("float32",) * 3] * 3


@small_cases
def test_no_float32_operands_under_transformation(case: Case) -> None:
    x, w = draw(case)

    def check(function: Any, *args: Any) -> None:
        found = products(function, *args)
        assert found
        assert {dtype for lhs, rhs, _ in found for dtype in (lhs, rhs)} == {"bfloat16"}

    for wide in ("rhs", "lhs rhs"):
        f = loss(case, wide)
        check(jax.grad(lambda x, w, f=f: jnp.sum(jnp.sin(jax.grad(f, 1)(x, w))), (0, 1)), x, w)
        check(lambda x, w, f=f: jax.jvp(jax.grad(f, (0, 1)), (x, w), (x, w)), x, w)
        check(jax.jacrev(jax.grad(f, 1)), x, w)
    stacked = [jnp.stack([a, a]) for a in (x, w)]
    if case.others:
        return  # JAX's own rule for batching ragged_dot wants everything batched
    for axes in itertools.product((0, None), repeat=2):
        if axes != (None, None):
            args = [s if axis == 0 else s[0] for s, axis in zip(stacked, axes, strict=True)]
            check(jax.vmap(jax.grad(loss(case, "rhs"), (0, 1)), axes), *args)
            check(jax.grad(lambda x, w, a=axes: jax.vmap(loss(case, "rhs"), a)(x, w).sum()), *args)


def test_zeros_stay_symbolic() -> None:
    x, w = draw(CASES["matrix"])
    f = loss(CASES["matrix"], "rhs")
    b = "bfloat16"
    assert products(jax.grad(f, 1), x, w) == [(b, b, b), (b, b, "float32")]
    assert products(jax.grad(f, 0), x, w) == [(b, b, b)] * 2
    assert (
        products(lambda x, w, t: jax.jvp(lambda w: f(x, w), (w,), (t,)), x, w, w) == [(b, b, b)] * 2
    )


def tangents(x: Any, w: Any) -> tuple[Any, Any]:
    return jnp.roll(x, 1, axis=0), jnp.roll(w, 2, axis=-1)


@pytest.mark.slow
@small_cases
@pytest.mark.parametrize("wide", ["lhs", "rhs", "lhs rhs"])
def test_forward_mode(case: Case, wide: str) -> None:
    x, w = draw(case)
    f, full = low(case, wide), lambda x, w: case.function(x, w, *case.others)
    y, t = jax.jvp(f, (x, w), tangents(x, w))
    y32, t32 = jax.jvp(full, (x, w), tangents(x, w))
    assert y.dtype == t.dtype == jnp.bfloat16
    assert error(y, y32) < 1e-2
    assert error(t, t32) < 1e-2
    linear = jax.linearize(f, x, w)[1]
    assert error(linear(*tangents(x, w)), t32) < 1e-2
    for i in range(2):
        only = [a if j == i else jnp.zeros_like(a) for j, a in enumerate(tangents(x, w))]
        t, t32 = (jax.jvp(g, (x, w), tuple(only))[1] for g in (f, full))
        assert error(t, t32) < 1e-2


@pytest.mark.slow
@small_cases
@pytest.mark.parametrize("wide", ["rhs", "lhs rhs"])
def test_second_derivatives(case: Case, wide: str) -> None:
    """Both modes, with the mixed derivatives, which a product under stop_gradient would lose."""
    x, w = (a / 2 for a in draw(case))
    v = tangents(x, w)

    def forward_over_reverse(f: Any, v: Any) -> Any:
        return jax.jvp(jax.grad(f, (0, 1)), (x, w), v)[1]

    def reverse_over_reverse(f: Any, v: Any) -> Any:
        def along(x: Any, w: Any) -> Any:
            return sum(map(jnp.vdot, jax.grad(f, (0, 1))(x, w), v))

        return jax.grad(along, (0, 1))(x, w)

    zero = jax.tree.map(jnp.zeros_like, v)
    directions = [v, (v[0], zero[1]), (zero[0], v[1])]
    full = jax.jit(functools.partial(forward_over_reverse, loss(case)))
    for mode in (forward_over_reverse, reverse_over_reverse):
        function = jax.jit(functools.partial(mode, loss(case, wide)))
        for direction in directions:
            got, want = function(direction), full(direction)
            assert max(map(error, got, want)) < 3e-2
            assert all(a.dtype == jnp.float32 for a in got)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["matrix", "batched", "conv grouped", "ragged"])
def test_jacobians(name: str) -> None:
    small = {
        "matrix": dot("ab,bc->ac", (5, 4), (4, 3), contract="b"),
        "batched": dot("gab,gbc->gac", (2, 3, 4), (2, 4, 3), contract="b", batch="g"),
        "conv grouped": conv((1, 4, 4, 4), (2, 2, 2, 6), NHWC, feature_group_count=2),
        "ragged": Case(lax.ragged_dot, ((6, 3), (2, 3, 2)), None, (np.int32([4, 2]),)),
    }
    case = small[name]
    x, w = draw(case)
    modes = [jax.jacrev] if case.others else [jax.jacfwd, jax.jacrev]  # JAX's ragged_dot has none
    plain = low(case, "")
    for wide, mode, i in itertools.product(("rhs", "lhs rhs"), modes, range(2)):
        y, pull = jax.vjp(plain, x, w)
        rows = [pull(row.reshape(y.shape))[i] for row in jnp.eye(y.size, dtype=y.dtype)]
        got = jax.jit(mode(low(case, wide), i))(x, w).astype(jnp.float32)
        assert error(got, jnp.stack(rows).reshape(got.shape)) < 1e-6
    if name != "matrix":
        return
    hessians = [
        jax.jit(outer(inner(loss(case, "rhs"), 1), 0))(x, w)
        for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2)
    ]
    for got in hessians[1:]:
        assert error(got, hessians[0]) < 3e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[name] for name in SMALL[:-1]], ids=SMALL[:-1])
def test_vmap(case: Case) -> None:
    """Over either operand and both, along odd axes, inside of gradients and outside, and twice.

    JAX batches `ragged_dot` only with its group sizes, as the next test does.
    """
    x, w = (
        jnp.stack(parts, -1) for parts in zip(*(draw(case, seed) for seed in range(3)), strict=True)
    )
    gradient = jax.jit(jax.grad(weighted(case, "rhs"), (0, 1)))
    for in_x, in_w in ((True, True), (True, False), (False, True)):
        xs, ws = x if in_x else x[..., 0], w if in_w else w[..., 0]
        axes = (-1 if in_x else None, -1 if in_w else None)
        want = [gradient(xs[..., i] if in_x else xs, ws[..., i] if in_w else ws) for i in range(3)]
        each = [jnp.stack(parts) for parts in zip(*want, strict=True)]
        got = jax.jit(jax.vmap(gradient, axes))(xs, ws)
        assert [a.dtype for a in got] == [jnp.float32] * 2
        assert max(map(error, got, each)) < 1e-2
        total = jax.grad(
            lambda x, w, a=axes: jax.vmap(weighted(case, "rhs"), a)(x, w).sum(), (0, 1)
        )
        want = [
            jnp.moveaxis(each[0], 0, -1) if in_x else each[0].sum(0),
            jnp.moveaxis(each[1], 0, -1) if in_w else each[1].sum(0),
        ]
        assert max(map(error, total(xs, ws), want)) < 1e-2
    twice = jax.jit(jax.vmap(jax.vmap(gradient, (None, -1)), (-1, None)))(x, w)
    want = gradient(x[..., 2], w[..., 1])
    assert max(map(error, [a[2, 1] for a in twice], want)) < 1e-2


def test_vmap_of_ragged() -> None:
    sizes = np.int32([[17, 0, 31, 12], [15, 15, 15, 15]])
    case = CASES["ragged"]
    each = [(*draw(case, seed), sizes[seed]) for seed in range(2)]

    @jax.jit
    def gradient(x: Any, w: Any, sizes: Any) -> Any:
        return jax.grad(loss(dataclasses.replace(case, others=(sizes,)), "rhs"), (0, 1))(x, w)

    got = jax.jit(jax.vmap(gradient))(*map(np.stack, zip(*each, strict=True)))
    for args, result in zip(each, zip(*map(np.asarray, got), strict=True), strict=True):
        assert max(map(error, result, gradient(*args))) < 1e-2


def test_vmap_when_only_some_operands_are_batched() -> None:
    """A source batched without its rounding, and the reverse."""
    case = CASES["matrix"]
    x, w = draw(case)
    params = {
        "dimension_numbers": (((1,), (0,)), ((), ())), "precision": None,
        "preferred_element_type": jnp.dtype(jnp.bfloat16), "out_sharding": None,
    }  # fmt: skip
    dot_p = jax.extend.core.primitives.dot_general_p

    def f(rounded: Any, source: Any) -> Any:
        return product(dot_p, params, [x.astype(jnp.bfloat16), rounded], [None, source])

    def gradient(rounded: Any, source: Any) -> Any:
        return jax.vjp(f, rounded, source)[1](np.ones((48, 8), jnp.bfloat16))[1]

    rounded = np.asarray(w, jnp.bfloat16)
    want = gradient(rounded, w)
    for args, axes in (
        ((rounded, np.stack([w, w])), (None, 0)),
        ((np.stack([rounded] * 2), w), (0, None)),
    ):
        got = np.asarray(jax.vmap(gradient, axes)(*args))
        assert got.shape == (2, *w.shape)
        np.testing.assert_array_equal(got[1], want)


def test_linear_transpose() -> None:
    case = CASES["matrix"]
    x, w = draw(case)
    ct = np.ones((48, 8), jnp.bfloat16)
    (gw,) = jax.linear_transpose(lambda w: low(case, "rhs")(x, w), w)(ct)
    (gx,) = jax.linear_transpose(lambda x: low(case, "rhs")(x, w), x)(ct)
    assert error(gw, np.asarray(x).T @ np.ones((48, 8))) < 1e-6
    assert error(gx, np.ones((48, 8)) @ np.asarray(w).T) < 1e-2
    with pytest.raises(TypeError, match="linear in one operand"):
        jax.linear_transpose(low(case, "rhs"), x, w)(ct)


@pytest.mark.parametrize("shared", [False, True], ids=["a weight a step", "one weight"])
def test_scan(shared: bool) -> None:
    steps = 64
    random = np.random.default_rng(0)
    xs, w = (drawn(random, shape) for shape in ((steps, 16, 8), (8, 4)))
    ws = w if shared else np.stack([w] * steps)
    case = dot("ab,bc->ac", (16, 8), (8, 4), contract="b")

    def total(ws: Any, wide: str) -> Any:
        def body(carry: Any, step: Any) -> Any:
            x, w = (step, ws) if shared else step
            return carry + low(case, wide)(x, w).astype(jnp.float32).sum(), None

        return lax.scan(body, jnp.float32(0), xs if shared else (xs, ws))[0]

    want = np.stack([np.asarray(xs, np.float64).sum(1)] * 4, -1)
    want = want.sum(0) if shared else want
    assert error(jax.jit(jax.grad(total), static_argnums=1)(ws, "rhs"), want) < 1e-6
    assert error(jax.jit(jax.grad(total), static_argnums=1)(ws, ""), want) > 1e-3


def test_scan_saves_the_float32_weights_by_reference() -> None:
    """They are operands of the backward pass, but what it keeps are the ones that came in."""
    case = dot("ab,bc->ac", (16, 8), (8, 8), contract="b")

    def chain(ws: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return low(case, "rhs")(x, w).astype(jnp.float32), None

        return lax.scan(body, x, ws)[0].sum()

    ws, x = jnp.ones((5, 8, 8)), jnp.ones((16, 8))
    jaxpr = jax.make_jaxpr(lambda ws, x: jax.vjp(chain, ws, x))(ws, x)
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    stacked = [v.aval for v in scan.outvars if v.aval.shape == ws.shape]
    assert [str(a.dtype) for a in stacked] == ["bfloat16"]
    assert jaxpr.jaxpr.invars[0] in jaxpr.jaxpr.outvars


@pytest.mark.parametrize(
    ("policy", "saved"),
    [("dots_saveable", True), ("dots_with_no_batch_dims_saveable", True),
     ("nothing_saveable", False)],
)  # fmt: skip
def test_checkpoint_policies_see_the_product(policy: str, saved: bool) -> None:
    case = dot("ab,bc->ac", (16, 8), (8, 8), contract="b")

    def chain(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.sin(low(case, "rhs")(x, w)).astype(jnp.float32)
        return x.sum()

    ws, x = jax.device_put(([np.full((8, 8), 0.1)] * 3, np.ones((16, 8))))
    remat = jax.checkpoint(chain, policy=getattr(jax.checkpoint_policies, policy))
    forward, backward = 3, 3 + 2
    recomputed = 0 if saved else 3
    assert len(products(jax.grad(chain), ws, x)) == forward + backward
    assert len(products(jax.grad(remat), ws, x)) == forward + backward + recomputed
    grads = (jax.jit(jax.grad(f))(ws, x) for f in (remat, chain))
    for got, want in zip(*grads, strict=True):
        assert got.dtype == jnp.float32
        assert error(got, want) < 1e-2


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["matrix", "conv strided"])
def test_shard_map(name: str, check_vma: bool) -> None:
    case = CASES[name]
    x, w = draw(case)
    x = np.concatenate([x] * 8)
    x *= np.linspace(0.5, 1, len(x), dtype=np.float32).reshape(-1, *[1] * (x.ndim - 1))

    def gradient(wide: str) -> Any:
        def local(x: Any, w: Any) -> Any:
            if check_vma:
                return jax.grad(lambda w: lax.psum(weighted(case, wide)(x, w), "data"))(w)
            return lax.psum(jax.grad(weighted(case, wide), 1)(x, w), "data")

        specs = {"in_specs": (P("data"), P()), "out_specs": P(), "check_vma": check_vma}
        return jax.jit(jax.shard_map(local, mesh=MESH, **specs))

    each = jax.jit(jax.grad(weighted(case, "rhs"), 1))
    want = sum(np.asarray(each(part, w)) for part in np.split(x, 8))
    assert error(gradient("rhs")(x, w), want) < 1e-6
    if check_vma:  # the sum over devices that JAX puts in by itself
        assert sums(gradient("rhs"), x, w) == {"float32"}
        assert "bfloat16" in sums(gradient(""), x, w)  # positive control


def sums(function: Any, *args: Any) -> set[str]:
    found = [e for e in equations(jax.make_jaxpr(function)(*args)) if "psum" in e.primitive.name]
    return {str(v.aval.dtype) for e in found for v in e.invars if v.aval.ndim > 1}


def test_shard_map_of_gradients_outside() -> None:
    case = CASES["matrix"]
    x, w = draw(case)

    def total(w: Any, x: Any) -> Any:
        local = lambda w, x: lax.psum(loss(case, "rhs")(x, w), "data")  # noqa: E731
        return jax.shard_map(local, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())(w, x)

    def derivatives(gradient: Any) -> Any:
        return jax.jit(lambda w: jax.jvp(gradient, (w,), (w,)))(w)

    got, second = derivatives(lambda w: jax.grad(total)(w, x))
    want, wanted_second = derivatives(jax.grad(lambda w: loss(case, "rhs")(x, w)))
    assert error(got, want) < 1e-4
    assert error(second, wanted_second) < 2e-2


@pytest.mark.parametrize("name", ["matrix", "conv"])
def test_the_partitioner_sums_in_float32(name: str) -> None:
    case = CASES[name]
    x, w = draw(case)
    x = np.concatenate([x] * 4)
    args = (
        jax.device_put(x, NamedSharding(MESH, P("data"))),
        jax.device_put(w, NamedSharding(MESH, P())),
    )
    found = {}
    for wide in ("rhs", ""):
        text = after_partitioning(jax.grad(loss(case, wide), 1), *args)
        found[wide] = set(re.findall(r"= (\w+)\[[\d,]+\]\S* all-reduce\(", text))
    assert found == {"rhs": {"f32"}, "": {"bf16"}}


def test_lowering_by_platform() -> None:
    """16-bit operands everywhere but on CPU, which fails to run many such products."""
    x, w = draw(CASES["matrix"])
    traced = jax.jit(jax.grad(loss(CASES["matrix"], "rhs"), 1)).trace(x, w)
    signature = r"dot_general .*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\) -> .*x(\w+)>"
    for platform, kind in (("tpu", "bf16"), ("cuda", "bf16"), ("cpu", "f32")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert re.findall(signature, text) == [("bf16",) * 3, (kind, kind, "f32")]


def test_products_that_cpus_cannot_run() -> None:
    """What other platforms run fails on CPU for some layouts; what is lowered there does not."""
    failed = 0
    for name in ("weight first", "permuted"):
        x, w = draw(CASES[name])
        for wide in ("lhs", "rhs"):
            gradient = jax.jit(jax.grad(loss(CASES[name], wide), (0, 1)))
            jax.block_until_ready(gradient(x, w))
            for equation in jax.make_jaxpr(gradient)(x, w).jaxpr.eqns[0].params["jaxpr"].eqns:
                if equation.primitive.name == "low_precision_product":
                    elsewhere = jax.jit(jax.extend.core.jaxpr_as_fun(equation.params["jaxpr"]))
                    operands = [np.ones(v.aval.shape, v.aval.dtype) for v in equation.invars]
                    try:
                        jax.block_until_ready(elsewhere(*operands))
                    except jax.errors.JaxRuntimeError as failure:
                        failed += "DotThunk" in str(failure)
    assert failed >= 2  # positive control


def test_rules_are_derived_once_for_a_shape() -> None:
    bilinear_map.cache_clear()
    gradient = jax.grad(loss(CASES["matrix"], "rhs"), 1)
    for _ in range(3):
        jax.make_jaxpr(gradient)(*draw(CASES["matrix"]))
    assert bilinear_map.cache_info().misses == 1
    jax.make_jaxpr(jax.grad(loss(CASES["conv"], "rhs"), 1))(*draw(CASES["conv"]))
    assert bilinear_map.cache_info().misses == 2


def test_explicit_sharding_is_refused() -> None:
    x, w = draw(CASES["matrix"])
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        x = jax.device_put(x, NamedSharding(explicit, P("data")))
        with pytest.raises(
            NotImplementedError, match=r"automatic axes, by jax\.sharding\.auto_axes"
        ):
            jax.jit(jax.grad(loss(CASES["matrix"], "rhs"), 1))(x, w)
