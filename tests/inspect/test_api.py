"""What an audit counts, against counts by hand and against the compiler."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from jaxmp._tools.inspect.api import audit
from tests.support.audit_lines import array, line_of

pytestmark = pytest.mark.annotations

BF16, F32 = jnp.bfloat16, jnp.float32


def products(report: Any) -> dict[str, tuple[int, int, int]]:
    return {
        f"{' '.join(row.operands)} -> {row.result}": (row.count, row.runs, row.flops)
        for row in report.products
    }


def test_products_of_two_dtypes() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        return lax.dot(x @ w, v, preferred_element_type=F32)

    report = audit(f, array(4, 8, dtype=BF16), array(8, 16, dtype=BF16), array(16, 2, dtype=BF16))
    low, accumulated = 2 * 4 * 8 * 16, 2 * 4 * 16 * 2
    assert products(report) == {
        "bfloat16 bfloat16 -> bfloat16": (1, 1, low),
        "bfloat16 bfloat16 -> float32": (1, 1, accumulated),
    }
    assert report.flops == low + accumulated
    assert [row.share for row in report.products] == [low / 1280, accumulated / 1280]
    assert report.share("bf16") == 1.0
    assert report.share("float32") == 0.0
    assert report.upcasts == ()


def test_shares_of_operand_dtypes() -> None:
    def f(x: Any, w: Any) -> Any:
        low = x.astype(BF16) @ w.astype(BF16)
        return x @ w, low, lax.dot(x, w.astype(BF16), preferred_element_type=F32)

    report = audit(f, array(4, 8), array(8, 16))
    assert report.share("float32") == report.share("bfloat16") == pytest.approx(1 / 3)
    assert report.share("float32", "bfloat16") == 1.0
    assert audit(jnp.sin, array(3)).share("float32") == 0.0
    with pytest.raises(ValueError, match="unknown dtype 'bfloat17'"):
        report.share("bfloat17")


def compiled_flops(f: Any, *args: Any) -> float:
    return jax.jit(f).lower(*args).compile().cost_analysis()["flops"]


def mlp(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def attention(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).sum()


@pytest.mark.parametrize("differentiate", [False, True])
def test_flops_are_the_compilers(differentiate: bool) -> None:
    weights = [array(256, 512), array(512, 512), array(512, 128)]
    f = jax.value_and_grad(mlp) if differentiate else mlp
    flops = audit(f, weights, array(64, 256)).flops
    assert flops == pytest.approx(compiled_flops(f, weights, array(64, 256)), rel=0.02)
    q = array(2, 64, 4, 128)
    g = jax.value_and_grad(attention, (0, 1, 2)) if differentiate else attention
    assert audit(g, q, q, q).flops == pytest.approx(compiled_flops(g, q, q, q), rel=0.02)


CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"window_strides": (2, 2)},
    {"padding": "VALID"},
    {"rhs_dilation": (2, 2)},
    {"lhs_dilation": (2, 2), "padding": ((2, 2), (1, 2))},
    {"feature_group_count": 4},
    {"feature_group_count": 32},
    {"batch_group_count": 2},
    {"window_strides": (2, 1), "rhs_dilation": (1, 2), "padding": ((2, 1), (3, 0))},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_flops_of_convolutions_are_the_compilers(options: dict[str, Any]) -> None:
    defaults = {"window_strides": (1, 1), "padding": "SAME"}
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = functools.partial(
        lax.conv_general_dilated, dimension_numbers=numbers, **(defaults | options)
    )
    x, w = array(4, 16, 15, 32), array(3, 3, 32 // options.get("feature_group_count", 1), 64)
    assert audit(conv, x, w).flops == compiled_flops(conv, x, w)

    def gradients(x: Any, w: Any, y: Any) -> Any:
        return jax.vjp(conv, x, w)[1](y)

    y = jax.eval_shape(conv, x, w)
    both = audit(gradients, x, w, y)
    backward = [row for row in both.product_lines if row.direction == "backward"]
    assert sum(row.flops for row in backward) == compiled_flops(gradients, x, w, y)


def test_flops_of_ragged_products() -> None:
    args = array(64, 32), array(4, 32, 16), array(4, dtype=jnp.int32)
    assert audit(lax.ragged_dot, *args).flops == 2 * 64 * 32 * 16

    def loss(x: Any, w: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes).sum()

    report = audit(jax.grad(loss, (0, 1)), *args)
    assert report.flops == 3 * 2 * 64 * 32 * 16


def test_scans_are_multiplied_by_their_length() -> None:
    def inner(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]

    def outer(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, _: (inner(x, w) @ w, None), x, None, length=3)[0]

    report = audit(outer, array(4, 4), array(4, 4))
    runs = 3 * 5 + 3
    assert products(report) == {"float32 float32 -> float32": (2, runs, runs * 2 * 4**3)}
    assert report.count("dot_general") == 2
    assert report.count("dot_general", runs=True) == runs
    assert report.count("scan") == 2
    assert report.count("scan", runs=True) == 1 + 3
    assert report.count("no_such_primitive") == 0


def test_a_while_loop_is_counted_once() -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda x: (x @ x).sum() < 1, lambda x: x @ x @ x, x)

    report = audit(f, array(4, 4))
    assert products(report)["float32 float32 -> float32"] == (3, 3, 3 * 2 * 4**3)
    assert any("while loops (1)" in text for text in report.unseen)


def test_what_runs_elsewhere_or_never_is_not_counted() -> None:
    @jax.custom_vjp
    def squared(x: Any) -> Any:
        return x @ x

    squared.defvjp(lambda x: (x @ x @ x, x), lambda x, g: (g @ x @ x @ x,))

    @jax.custom_jvp
    def cubed(x: Any) -> Any:
        return x @ x @ x

    cubed.defjvp(lambda p, t: (cubed(*p), t[0] @ p[0]))

    def f(x: Any) -> Any:
        return lax.reduce(squared(x) + cubed(x), 0.0, lambda a, b: jnp.sin(a) + b, (0,))

    report = audit(f, array(4, 4))
    assert report.count("dot_general") == 1 + 2
    assert report.count("sin") == 0  # it combines two numbers
    backward = audit(jax.grad(lambda x: squared(x).sum()), array(4, 4))
    assert backward.count("dot_general") == 2 + 3  # the rules, once they are used


def test_a_solver_counts_only_what_solves() -> None:
    def f(a: Any, b: Any) -> Any:
        solve = functools.partial(lax.custom_linear_solve, lambda x: a @ (a @ x), b)
        return solve(lambda matvec, b: matvec(b) + a @ b, symmetric=True)

    assert audit(f, array(4, 4), array(4)).count("dot_general") == 2 + 1


def test_functions_that_jax_jits_once_count_each_time() -> None:
    @jax.jit
    def layer(x: Any) -> Any:
        return jax.checkpoint(lambda x: x @ x)(x)

    report = audit(jax.jit(lambda x: layer(layer(layer(x)))), array(4, 4))
    assert report.count("dot_general") == 3


def test_converts() -> None:
    def f(x: Any) -> Any:
        low = x.astype(BF16)
        y = lax.scan(lambda c, _: (c.astype(F32).astype(BF16), None), low, None, length=7)[0]
        return y.astype(F32), (x > 0).astype(jnp.int32)

    report = audit(f, array(4, 8))
    found = {(row.source, row.target): (row.count, row.runs, row.bytes) for row in report.converts}
    assert found == {
        ("float32", "bfloat16"): (2, 1 + 7, (1 + 7) * 4 * 8 * 2),
        ("bfloat16", "float32"): (2, 1 + 7, (1 + 7) * 4 * 8 * 4),
        ("bool", "int32"): (1, 1, 4 * 8 * 4),
    }
    assert report.count("convert_element_type") == 5


def test_a_planted_upcast_comes_first() -> None:
    def f(x: Any, weights: Any) -> Any:
        x = jnp.tanh(x @ weights[0])
        x = x.astype(F32)  # planted
        x = jnp.tanh(x.T.reshape(x.shape) @ weights[1].astype(F32))  # widened
        x = jnp.tanh(x @ weights[2].astype(F32))
        big = jnp.broadcast_to(weights[0].astype(BF16), (100, 8, 8)).astype(F32)  # only large
        return x.astype(BF16) @ weights[0], big

    report = audit(f, array(4, 8, dtype=BF16), [array(8, 8, dtype=BF16)] * 3)
    first, second, third, last = report.upcasts
    product = 2 * 4 * 8 * 8
    assert first.line == line_of("planted", "test_a_planted_upcast_comes_first.f")
    assert (first.source, first.target, first.kind) == ("bfloat16", "float32", "cast")
    assert (first.count, first.runs, first.bytes) == (1, 1, 4 * 8 * 4)
    assert (first.flops, first.share) == (2 * product, 0.5)
    assert second.line == line_of("widened", "test_a_planted_upcast_comes_first.f")
    assert (second.flops, third.flops) == (2 * product, product)
    assert last.line == line_of("only large", "test_a_planted_upcast_comes_first.f")
    assert (last.flops, last.bytes) == (0, 100 * 8 * 8 * 4)
    assert report.share("bfloat16") == 0.5


def test_a_planted_upcast_comes_first_where_what_it_widens_feeds_more() -> None:
    def f(x: Any, frozen: Any) -> Any:
        x = x.astype(F32)  # planted here
        return jnp.sum(x @ frozen.astype(F32))  # widened here

    args = array(4, 8, dtype=BF16), array(8, 8, dtype=BF16)
    first, second = audit(jax.value_and_grad(f), *args).upcasts
    product = 2 * 4 * 8 * 8
    name = "test_a_planted_upcast_comes_first_where_what_it_widens_feeds_more.f"
    assert (first.line, first.flops) == (line_of("planted here", name), product)
    assert (second.line, second.flops) == (line_of("widened here", name), 2 * product)


@pytest.mark.parametrize("ended", [True, False])
def test_a_cast_down_ends_an_upcast(ended: bool) -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        x = jnp.tanh(x.astype(F32))
        return (x.astype(BF16) @ w) if ended else (x @ v)

    report = audit(f, array(4, 8, dtype=BF16), array(8, 8, dtype=BF16), array(8, 8))
    assert [row.flops for row in report.upcasts] == [0 if ended else 2 * 4 * 8 * 8]


def test_a_single_number_connects_nothing() -> None:
    def f(x: Any, y: Any, w: Any) -> Any:
        norm = jnp.sum(x.astype(F32))  # a clipped gradient depends on its norm
        return (y / norm) @ w

    report = audit(f, array(4, 8, dtype=BF16), array(4, 8), array(8, 8))
    assert [row.flops for row in report.upcasts] == [0]


def test_a_product_of_mixed_operands_is_an_upcast_itself() -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.dot(x, w, preferred_element_type=F32)  # mixed

    (row,) = audit(f, array(4, 8, dtype=BF16), array(8, 16)).upcasts
    assert row.line == line_of("mixed", "test_a_product_of_mixed_operands_is_an_upcast_itself.f")
    assert (row.kind, row.source, row.target) == ("product", "bfloat16", "float32")
    assert (row.flops, row.share) == (2 * 4 * 8 * 16, 1.0)


def test_a_product_that_returns_more_bits_is_an_upcast_if_wide_ones_follow() -> None:
    def f(x: Any, w: Any) -> Any:
        x = lax.dot(x, w, preferred_element_type=F32)  # emits float32
        return x @ w.astype(F32)

    x = array(4, 8, dtype=BF16)
    first, second = audit(f, x, array(8, 8, dtype=BF16)).upcasts
    assert (first.kind, first.flops) == ("product", 2 * 4 * 8 * 8)
    assert first.line.startswith(line_of("emits float32").removesuffix(" ()"))
    assert second.kind == "cast"
    alone = audit(
        lambda x, w: lax.dot(x, w, preferred_element_type=F32), x, array(8, 8, dtype=BF16)
    )
    assert alone.upcasts == ()


def through_scan(x: Any, body: Any) -> Any:
    """The upcast value goes around twice before it meets a product."""
    carry = (x.astype(F32), jnp.zeros_like(x, F32), jnp.zeros_like(x, F32))
    return lax.scan(lambda c, _: ((c[0], c[0], c[1]), body(c[2])), carry, None, length=3)


def through_while(x: Any, body: Any) -> Any:
    carry = (0, x.astype(F32), jnp.zeros_like(x, F32), jnp.zeros_like(x, F32))
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], c[1] + body(c[3]), c[2]), carry
    )


def through_cond(x: Any, body: Any) -> Any:
    wide = x.astype(F32)
    return lax.cond(x[0, 0] > 0, lambda a, b: body(b), lambda a, b: a, jnp.zeros_like(wide), wide)


def through_calls(x: Any, body: Any) -> Any:
    wide = jax.jit(lambda x: jax.checkpoint(lambda x: x.astype(F32))(x))(x)
    called = jax.custom_vjp(lambda a, b: body(b))
    called.defvjp(lambda a, b: (body(b), None), lambda _, g: (None, g))
    return called(x, wide)


@pytest.mark.parametrize("way", [through_scan, through_while, through_cond, through_calls])
def test_upcasts_are_followed_into_and_out_of(way: Any) -> None:
    w = jnp.ones((8, 8))
    x = array(8, 8, dtype=BF16)
    (row,) = audit(lambda x: way(x, lambda y: y @ w), x).upcasts
    times = 3 if way is through_scan else 1
    assert row.flops == times * 2 * 8**3
    (row,) = audit(lambda x: way(x, lambda y: jnp.ones((8, 8)) @ w), x).upcasts
    assert row.flops == 0  # positive control: the product is there, but of something else


def test_lines_inside_of_cached_library_functions_are_those_of_the_callers() -> None:
    def f(x: Any) -> Any:
        a = jnp.var(x)  # first call
        b = jnp.var(x)  # second call
        return a + b

    lines = {row.line for row in audit(f, array(16, dtype=BF16)).upcasts}
    name = "test_lines_inside_of_cached_library_functions_are_those_of_the_callers.f"
    assert lines == {line_of("first call", name), line_of("second call", name)}


def test_passes_of_a_checkpoint() -> None:
    @jax.checkpoint
    def block(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w) @ w)

    report = audit(jax.grad(lambda w, x: block(x, w).sum()), array(8, 8), array(4, 8))
    by_pass: dict[str, int] = {}
    for row in report.product_lines:
        by_pass[row.direction] = by_pass.get(row.direction, 0) + row.count
    assert by_pass == {"forward": 2, "recomputed": 2, "backward": 3}
    assert {row.direction for row in audit(block, array(4, 8), array(8, 8)).product_lines} == {""}


def test_residuals() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = jnp.sin(x @ w)  # keeps its cosine
        return jnp.sum(h.astype(F32))

    args = array(8, 16, dtype=BF16), array(4, 8, dtype=BF16)
    (row,) = audit(loss, *args).residuals
    name = "test_residuals.loss"
    assert (row.line, row.dtype) == (line_of("keeps its cosine", name), "bfloat16")
    assert (row.count, row.bytes) == (1, 4 * 16 * 2)
    assert audit(jax.jit(loss), *args).residual_bytes == 128
    assert audit(jax.checkpoint(loss), *args).residual_bytes == 0
    assert audit(lambda w, x: (loss(w, x), {"x": x}), *args).residual_bytes == 128
    assert audit(lambda w, x: jnp.sum((x @ w).astype(F32)), *args).residual_bytes == 0


def test_residuals_of_a_scan_have_the_line_inside() -> None:
    def loss(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return jnp.sin(x), None  # inside the scan

        return lax.scan(body, x, None, length=7)[0].sum()

    (row,) = audit(loss, array(4)).residuals
    name = "test_residuals_of_a_scan_have_the_line_inside.loss.body"
    assert row.line == line_of("inside the scan", name)
    assert row.bytes == 7 * 4 * 4


NO_SCALAR = "its result is neither a float scalar nor"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("fn", "x", "reason"),
    [
        (lambda x: x, array(3), NO_SCALAR),
        (lambda x: (x, 1.0), array(3), NO_SCALAR),
        (lambda x: jnp.sum(x > 0), array(3), NO_SCALAR),
        (lambda x: lax.while_loop(lambda c: c < 3, lambda c: c * 2, x.sum()), array(3), "ValueErr"),
        (lambda n: n.sum().astype(F32), array(3, dtype=jnp.int32), "its first argument holds no"),
    ],
)
def test_no_residuals_of_what_is_no_loss(fn: Any, x: Any, reason: str) -> None:
    report = audit(fn, x)
    assert report.residuals is None
    assert reason in report.no_residuals
    with pytest.raises(ValueError, match="the audit has no residuals"):
        _ = report.residual_bytes


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives(check_vma: bool) -> None:
    def body(x: Any) -> Any:
        wide = jnp.tile(x, (8, 1))
        total = lax.psum(x, "data")  # sum
        gathered = lax.all_gather(x.astype(F32), "data")
        x = x + lax.psum_scatter(wide, "data") + lax.ppermute(x, "data", [(0, 1)])
        x = x + total + lax.pmax(x, "data") + lax.all_to_all(wide, "data", 0, 0).sum(0)
        x = lax.scan(lambda c, _: (c + lax.psum(c, "data"), None), x, None, length=5)[0]
        return x + gathered.sum((0, 1)).astype(BF16)

    spec = PartitionSpec("data")
    f = jax.shard_map(body, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=check_vma)
    report = audit(f, array(8, 4, dtype=BF16))
    one = 1 * 4 * 2  # what a device has of it
    found = {
        (row.name.removesuffix("_invariant"), row.dtype, row.count, row.runs, row.bytes)
        for row in report.collectives
    }
    assert found == {
        ("psum", "bfloat16", 1, 1, one),
        ("psum", "bfloat16", 1, 5, 5 * one),
        ("all_gather", "float32", 1, 1, 2 * one),
        ("reduce_scatter", "bfloat16", 1, 1, 8 * one),
        ("all_to_all", "bfloat16", 1, 1, 8 * one),
        ("ppermute", "bfloat16", 1, 1, one),
        ("pmax", "bfloat16", 1, 1, one),
    }
    assert all(row.axes == ("data",) for row in report.collectives)
    assert line_of("sum", "test_collectives.body") in {row.line for row in report.collectives}
    sums = [row for row in report.collectives if row.sums]
    assert sorted(row.bytes for row in sums) == [one, 5 * one, 8 * one]


def test_a_sum_over_a_mapped_axis_is_no_collective() -> None:
    f = jax.vmap(lambda x: lax.psum(x, "i"), axis_name="i")
    assert audit(f, array(3, 2)).collectives == ()


def test_arrays_of_a_train_state() -> None:
    params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx, scale=jnp.ones(3))
    step = jaxmp.make_train_step(lambda p, x, scale: ((x @ p["w"]).mean(), {}), "bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        report = audit(step, state, np.zeros((2, 8)))  # float64: JAX gives it float32
    rows = {(row.name, row.dtype): (row.leaves, row.elements, row.bytes) for row in report.arrays}
    assert rows["state.params", "bfloat16"] == (2, 36, 72)
    assert rows["state.opt_state.master", "float32"] == (2, 36, 144)
    assert rows["state.opt_state.inner", "float32"] == (4, 72, 288)
    assert rows["state.opt_state.inner", "int32"] == (1, 1, 4)
    assert rows["state.collections", "float32"] == (1, 3, 12)
    assert rows["batch", "float32"] == (1, 16, 64)
    assert rows["result[0].params", "bfloat16"] == (2, 36, 72)
    assert rows["result[1].loss", "float32"] == (1, 1, 4)
    assert {row.role for row in report.arrays if "result" in row.name} == {"result"}


def test_names_of_arguments() -> None:
    def f(x: Any, *more: Any, named: Any, **rest: Any) -> Any:
        return x

    x = array(2)
    names = [row.name for row in audit(f, x, x, x, named=x, other={"a": x, "b": x}).arrays]
    assert names == ["x", "more[0]", "more[1]", "named", "other.a", "other.b", "result"]
    many = {str(i): x for i in range(13)}
    (first, *_) = audit(f, many, named=x).arrays
    assert (first.name, first.leaves) == ("x", 13)


def test_what_is_no_array_is_handed_on() -> None:
    def f(x: Any, flag: bool, *, mode: str, scale: float = 1.0) -> Any:
        assert (flag, mode, scale) == (True, "exact", 0.5)
        return jnp.sin(x) if flag else x

    assert audit(f, array(2), True, mode="exact", scale=0.5).count("sin") == 1


@pytest.mark.usefixtures("unchecked")
def test_errors_are_those_of_tracing() -> None:
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        audit(lambda x, y: x @ y, array(2, 3), array(2, 3))
    with pytest.raises(TypeError, match="audit takes a function and its arguments, got dict"):
        audit({})


def test_a_message_in_a_checkpoint() -> None:
    """It has neither operands nor results, and costs nothing when it is computed again."""

    def loss(w: Any, x: Any) -> Any:
        def inner(x: Any) -> Any:
            jax.debug.print("here")
            return jnp.tanh(x @ w)

        return jnp.sum(jax.checkpoint(inner)(x) @ w)

    assert jaxmp.audit(loss, jnp.eye(4), jnp.ones((2, 4))).recomputed


def test_what_only_moves_is_not_computed_again() -> None:
    """A line of its own for a transpose would say that it costs 0 operations."""

    def loss(w: Any, x: Any) -> Any:
        def inner(x: Any) -> Any:
            turned = x.T
            return jnp.tanh(turned @ w)

        return jnp.sum(jax.checkpoint(inner)(x) @ w)

    rows = jaxmp.audit(loss, jnp.eye(4), jnp.ones((4, 4))).recomputed
    assert rows
    assert all(row.operations > 0 for row in rows), rows
