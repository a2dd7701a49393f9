"""The first operation that overflows is named, wherever it is; each site is planted by hand."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from jaxmp._program.program import read
from jaxmp._tools.diagnostics.one_by_one import OneByOne, RunValue
from jaxmp.diagnostics import find_overflow
from tests.support.audit_lines import line_of

pytestmark = [
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.programs(150, reason="find_overflow runs one operation after the other"),
]

N = 8
X = jnp.full((N, N), 0.5)
PARAMS = {"first": jnp.full((N, N), 0.25), "second": jnp.full((N, N), 0.25)}
F16 = jnp.float16
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",))


def on_devices(local: Any) -> Any:
    """Runs a function of a weight and the part of a batch on each of eight devices."""
    return jax.shard_map(local, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())


def blow_up(x: jax.Array) -> jax.Array:
    """2**15 times 0.5 fits float16, and four times that does not."""
    x = x * jnp.asarray(2.0**15, x.dtype)
    return x * jnp.asarray(4.0, x.dtype)  # planted


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x.astype(F16) @ w.astype(F16))


def end(x: jax.Array) -> jax.Array:
    return jnp.mean(x.astype(jnp.float32))


@jax.custom_vjp
def steep(x: jax.Array) -> jax.Array:
    """Its derivative overflows, which its author wrote."""
    return x


def steep_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


def steep_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    big = jnp.full_like(g, 2.0**15)
    return (big * big,)


steep.defvjp(steep_forward, steep_backward)


def in_forward(p: Any, x: Any) -> Any:
    return end(blow_up(layer(x, p["first"])))


def in_a_scan(p: Any, x: Any) -> Any:
    """In the second of three layers."""

    def body(x: Any, both: Any) -> Any:
        w, factor = both
        x = layer(x, w) + factor
        return jnp.where(factor > 0, blow_up(x), x), None

    stacked = (jnp.stack([p["first"]] * 3), jnp.array([0.0, 1.0, 0.0], F16))
    return end(lax.scan(body, x.astype(F16), stacked)[0])


def in_a_nested_scan(p: Any, x: Any) -> Any:
    def outer(x: Any, row: Any) -> Any:
        def inner(x: Any, here: Any) -> Any:
            return jnp.where(here, blow_up(x), layer(x, p["first"])), None

        return lax.scan(inner, x, row)[0], None

    marks = jnp.array([[False, False, False], [False, False, True]])
    return end(lax.scan(outer, x.astype(F16), marks)[0])


def in_a_checkpoint(p: Any, x: Any) -> Any:
    return end(jax.checkpoint(lambda x: blow_up(layer(x, p["first"])))(x))


def in_a_branch(p: Any, x: Any) -> Any:
    h = layer(x, p["first"])
    return end(lax.cond(jnp.sum(h) > 0, blow_up, lambda x: x, h))


def in_a_while_in_a_vmap(p: Any, x: Any) -> Any:
    """Rows turn until they are done; one that is done would overflow if it turned on."""
    h = layer(x, p["first"])
    turns = jnp.arange(N) % 3  # those that turn twice are broken in their second turn

    def row(h: Any, turns: Any) -> Any:
        body = lambda c: (c[0] + 1, jnp.where(c[0] > 0, blow_up(c[1]), c[1]))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < turns, body, (0, h))[1]

    return end(h) + lax.stop_gradient(end(jax.vmap(row)(h, turns)))


def in_a_custom_vjp(p: Any, x: Any) -> Any:
    return end(steep(layer(x, p["first"])))  # too steep


def before_nan(p: Any, x: Any) -> Any:
    """Infinity minus infinity: NaN comes of it, two operations later."""
    h = layer(x, p["first"])
    return end(blow_up(h) - blow_up(2 * h))


def in_a_shard_map(p: Any, x: Any) -> Any:
    """On one of eight devices."""

    def local(w: Any, x: Any) -> Any:
        h = layer(x, w)
        h = jnp.where(lax.axis_index("data") == 5, blow_up(h), h)
        return lax.pmean(end(h), "data")

    return on_devices(local)(p["first"], x)


def in_a_scan_in_a_shard_map(p: Any, x: Any) -> Any:
    def local(w: Any, x: Any) -> Any:
        def body(h: Any, here: Any) -> Any:
            return jnp.where(here, blow_up(h), layer(h, w)), None

        h = lax.scan(body, x.astype(F16), jnp.array([False, True]))[0]
        return lax.psum(end(h), "data")

    return on_devices(local)(p["first"], x)


def in_a_mutable_array(p: Any, x: Any) -> Any:
    """What was infinite when it was written is so where it is read."""
    most = jax.new_ref(jnp.zeros((N, N), F16))

    def body(h: Any, w: Any) -> Any:
        h = layer(h, w).astype(F16)
        most[...] = most[...] + blow_up(lax.stop_gradient(h))
        return h, None

    h, _ = lax.scan(body, x.astype(F16), jnp.stack([p["first"]] * 2))
    return end(h) + end(jnp.tanh(most[...]) * most[...])


def call_steep(x: jax.Array) -> jax.Array:
    return steep(x)  # steep call


def backward_in_a_scan(p: Any, x: Any) -> Any:
    """In the second of three layers."""

    def body(x: Any, here: Any) -> Any:
        return lax.cond(here, call_steep, lambda x: x, layer(x, p["first"])), None

    return end(lax.scan(body, x.astype(F16), jnp.array([False, True, False]))[0])


def backward_in_a_checkpoint(p: Any, x: Any) -> Any:
    return end(jax.checkpoint(lambda w, x: call_steep(layer(x, w)))(p["first"], x))


def backward_in_a_shard_map(p: Any, x: Any) -> Any:
    def local(w: Any, x: Any) -> Any:
        return lax.pmean(end(call_steep(layer(x, w))), "data")

    return on_devices(local)(p["first"], x)


def loss_under_autocast(p: Any, x: Any) -> Any:
    def body(x: Any, factor: Any) -> Any:
        return jnp.tanh(x @ (p["first"] * factor)), None  # cast by autocast

    factors = jnp.array([1.0, 1.0, 2.0**20])
    return jnp.mean(lax.scan(jax.checkpoint(body), x, factors)[0])


def in_a_scan_under_autocast(p: Any, x: Any) -> Any:
    return jaxmp.autocast(loss_under_autocast, "mixed_float16")(p, x)


class Site(NamedTuple):
    """Where an overflow is planted: in a function, in the line that ends in a comment."""

    loss: Callable[..., Any]
    function: str = "blow_up"
    direction: str = "forward"
    turns: tuple[int, ...] = ()
    comment: str = "planted"
    operation: str = "mul"


BACKWARD = Site(in_forward, "call_steep", "backward", comment="steep call")

SITES = {
    "forward": Site(in_forward),
    "scan": Site(in_a_scan, turns=(1,)),
    "nested scan": Site(in_a_nested_scan, turns=(1, 2)),
    "checkpoint": Site(in_a_checkpoint),
    "branch": Site(in_a_branch),
    "while in a vmap": Site(in_a_while_in_a_vmap, turns=(1,)),
    "custom_vjp": Site(
        in_a_custom_vjp, function="in_a_custom_vjp", direction="backward", comment="too steep"
    ),
    "before NaN": Site(before_nan),
    "shard_map": Site(in_a_shard_map),
    "scan in a shard_map": Site(in_a_scan_in_a_shard_map, turns=(1,)),
    "mutable array": Site(in_a_mutable_array, turns=(0,)),
    "backward in a scan": BACKWARD._replace(loss=backward_in_a_scan, turns=(1,)),
    "backward in a checkpoint": BACKWARD._replace(loss=backward_in_a_checkpoint),
    "backward in a shard_map": BACKWARD._replace(loss=backward_in_a_shard_map),
    "scan under autocast": Site(
        in_a_scan_under_autocast,
        function="loss_under_autocast.body",
        turns=(2,),
        direction="recomputed",  # tanh hides it in the forward pass
        comment="cast by autocast",
        operation="convert_element_type",
    ),
}
FIRST = (
    *("forward", "mutable array", "scan", "checkpoint", "branch"),
    *("custom_vjp", "shard_map", "backward in a scan"),
)
MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=MORE) for name in SITES if name not in FIRST)]
)
def test_the_line_is_named(name: str) -> None:
    site = SITES[name]
    found = find_overflow(site.loss, PARAMS, X)
    assert found.line == line_of(site.comment, site.function)
    assert (found.operation, found.dtype) == (site.operation, "float16")
    assert found.direction == site.direction
    assert found.turns == site.turns
    assert found.infinite > 0


class Model(nn.Module):
    """Two layers; the second has large weights."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(N, name="small")(x)
        large = nn.initializers.constant(2.0**14)
        return nn.Dense(N, name="large", kernel_init=large)(nn.relu(h) + 1)  # of linen


def test_layers_of_linen_are_named_by_their_path() -> None:
    model = jaxmp.linen.apply_policy(Model(), "mixed_float16")
    params = jax.jit(model.init)(jax.random.key(0), X)
    found = find_overflow(lambda p, x: jnp.mean(model.apply(p, x)), params, X)
    assert (found.operation, found.path) == ("dot_general", "Model/large")
    assert found.line == line_of("of linen", "Model.__call__")
    assert [each.largest for each in found.operands][1] == 2.0**14


def large_product(p: Any, x: Any) -> Any:
    with jax.named_scope("block"):
        h = x @ p["first"]
        return jnp.mean(h @ (p["second"] * 2.0**16) @ p["first"])  # in 16 bits


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("compute=float16,products=tensorwise", marks=MORE)]
)
def test_under_autocast_the_value_overflows_that_is_rounded(policy: str) -> None:
    """The weight does not fit float16; in float8 it is never float16, and the product is."""
    if "tensorwise" in policy:
        policy = "params=float32,output=float32," + policy
    params = jax.tree.map(lambda x: jnp.tile(x, (2, 2)), PARAMS)
    found = find_overflow(large_product, params, jnp.tile(X, (2, 2)), policy=policy)
    assert found.line == line_of("in 16 bits", "large_product")
    assert found.path == "block"
    assert found.dtype == "float16"


def backward_only(p: Any, x: Any) -> Any:
    return end(layer(x, p["first"]).astype(F16))  # fine without a scale


def test_a_loss_scale_that_is_too_large() -> None:
    """What overflows is the derivative, where it is cast to 16 bits."""
    assert find_overflow(backward_only, PARAMS, X) is None
    found = find_overflow(backward_only, PARAMS, X, loss_scale=2.0**23)
    assert (found.operation, found.direction) == ("convert_element_type", "backward")
    assert found.operands[0].largest == 2.0**23 / N**2
    assert found.reaches == ("gradients/first",)
    assert found.gradients == 2


def test_what_is_given_is_not_finite_itself() -> None:
    params = PARAMS | {"second": PARAMS["second"].at[2, 3].set(jnp.nan)}
    found = find_overflow(lambda p, x: jnp.sum(x @ p["first"] @ p["second"]), params, X)
    assert (found.operation, found.line, found.nan) == ("argument", "params/second", 1)
    assert found.index == (2, 3)
    assert "params/second was given with 1 NaN of 64 numbers in float32" in str(found)
    batch = {"x": X, "y": jnp.array([1.0, jnp.inf])}
    found = find_overflow(lambda p, b: jnp.sum(b["x"] @ p["first"]) * b["y"][1], PARAMS, batch)
    assert (found.line, found.infinite) == ("batch/y", 1)
    wide = {"first": np.full((N, N), 1e300)}  # finite in NumPy's float64
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
        found = find_overflow(lambda p, x: jnp.sum(x @ p["first"]), wide, X)
    assert (found.line, found.dtype, found.infinite) == ("params/first", "float32", 64)


@pytest.mark.exhaustive
def test_one_array_at_two_places_has_the_name_of_the_first() -> None:
    params = PARAMS | {"first": PARAMS["first"].at[0, 0].set(jnp.nan)}
    found = find_overflow(
        lambda p, b: jnp.sum(p["first"]) + jnp.sum(b["ema"]["second"]), params, {"ema": params}
    )
    assert found.line == "params/first"


def test_infinities_that_a_program_uses_do_not_count() -> None:
    """A mask of -inf, and a logarithm of zero that an exponential takes back."""

    def masked(p: Any, x: Any) -> Any:
        scores = jnp.where(jnp.tri(N, dtype=bool), x @ p["first"], -jnp.inf)
        weights = jnp.exp(jnp.log(jax.lax.stop_gradient(jnp.maximum(x - 0.5, 0.0))))
        return jnp.sum(jax.nn.softmax(scores) @ p["second"]) + jnp.sum(weights)

    assert find_overflow(masked, PARAMS, X) is None
    found = find_overflow(lambda p, x: masked(p, x) + in_forward(p, x), PARAMS, X)
    assert found.line == line_of("planted", "blow_up")


def test_rows_that_are_masked_whole_are_found() -> None:
    """Each number of the row is -inf by the program; NaN comes of their difference."""

    def empty(p: Any, x: Any) -> Any:
        scores = jnp.where(jnp.zeros((N, N), bool), x @ p["first"], -jnp.inf)
        return jnp.sum(jax.nn.softmax(scores))  # of nothing

    found = find_overflow(empty, PARAMS, X)
    assert (found.operation, found.nan) == ("sub", N * N)
    assert found.line == line_of("of nothing", "test_rows_that_are_masked_whole_are_found.empty")


def test_collections_and_aux() -> None:
    def loss(p: Any, x: Any, batch_stats: Any) -> Any:
        return in_forward(p, x) + batch_stats["mean"], {"aux": 1}

    found = find_overflow(loss, PARAMS, X, has_aux=True, batch_stats={"mean": jnp.nan * X[0, 0]})
    assert (found.operation, found.line) == ("argument", "batch_stats/mean")


def test_it_prints_a_line_for_each_fact() -> None:
    assert str(find_overflow(in_a_scan, PARAMS, X)) == (
        "mul gives 64 infinite of 64 numbers in float16, first at (0, 0)\n"
        f"  at: {line_of('planted', 'blow_up')}, forward, turn 1 of its loop\n"
        "  from: float16[8, 8] of 6.26e+04 to 6.26e+04\n"
        "  from: float16[] of 4 to 4\n"
        "  then not finite: 1 of 2 gradients (first)"
    )


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=MORE), True])
def test_loops_run_as_in_jax(reverse: bool) -> None:
    """The control: without an overflow, one after the other gives what the program gives."""

    def fun(x: jax.Array) -> Any:
        def turn(c: Any, row: Any) -> Any:
            c = lax.cond(row[0] > 0.4, jnp.sin, jnp.cos, c + row)
            return c, (c * 2, row)

        last, stacked = lax.scan(turn, x[0], x, reverse=reverse)
        most = lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 1.5), (0, last))
        return most, stacked

    x = jnp.linspace(0, 1, 64).reshape(8, 8)
    closed = jax.make_jaxpr(fun)(x)
    run = OneByOne(lambda place, operands, results: [None] * len(results), lambda x, notes: None)
    made = [value.array for value in run.run(read(closed), [RunValue(x, None)])]
    for got, want in zip(made, jax.tree.leaves(fun(x)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_params_that_are_split_over_devices(mesh: Any) -> None:
    """FSDP and a split batch, on meshes with either kind of axes."""
    split = NamedSharding(mesh, P("data"))
    params, x = jax.device_put((PARAMS, X.at[3, 2].set(1e6)), split)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p["first"]) @ p["second"])  # over devices

    with jax.set_mesh(mesh):
        assert find_overflow(loss, params, jax.device_put(X, split), policy="mixed_float16") is None
        found = find_overflow(loss, params, x, policy="mixed_float16")
    assert (found.operation, found.index) == ("convert_element_type", (3, 2))
    assert found.line == line_of("over devices", "test_params_that_are_split_over_devices.loss")
    assert found.reaches == ("gradients/first",)


@pytest.mark.exhaustive
def test_beside_infinities_that_are_meant() -> None:
    """Whether these are written in the program, from a logarithm or given: the cast overflows."""
    mask = jnp.tri(N)

    def written(p: Any, x: Any) -> Any:
        s = jnp.where(mask > 0, x @ p["first"] * 2.0**17, -jnp.inf)
        return jnp.sum(jnp.exp(s.astype(F16)))  # beside

    def of_a_logarithm(p: Any, x: Any) -> Any:
        s = (x @ p["first"] * 2.0**17).astype(F16)  # before the mask
        return jnp.sum(jax.nn.softmax(s + jnp.log(mask).astype(F16)))

    def given(p: Any, x: Any, bias: Any) -> Any:
        s = (x @ p["first"] * 2.0**17 + bias).astype(F16)  # with a bias
        return jnp.sum(jax.nn.softmax(s))

    for fun, args, comment in (
        (written, (), "beside"),
        (of_a_logarithm, (), "before the mask"),
        (given, (jnp.log(mask),), "with a bias"),
    ):
        found = find_overflow(fun, PARAMS, X, *args)
        assert found.operation == "convert_element_type"
        name = f"test_beside_infinities_that_are_meant.{fun.__name__}"
        assert found.line == line_of(comment, name)


def test_what_may_be_meant_is_named_if_there_is_nothing_else() -> None:
    found = find_overflow(lambda p, x: jnp.sum(jnp.log(x @ p["first"] * 0)), PARAMS, X)
    assert (found.operation, found.reaches[0]) == ("log", "loss")

    def of_an_infinity(p: Any, x: Any) -> Any:
        """As of a number in the program that float16 does not hold: NaN comes of it later."""
        h = x.astype(F16) * jnp.asarray(jnp.inf, F16)
        return end(h @ p["first"].astype(F16) @ (p["second"] - 0.25).astype(F16))

    found = find_overflow(of_an_infinity, PARAMS, X)
    assert (found.operation, found.infinite, found.dtype) == ("constant", 1, "float16")
    data = X.at[1, 1].set(jnp.nan)
    found = find_overflow(lambda p: jnp.sum(data @ p["first"]), PARAMS)  # closed over
    assert (found.operation, found.nan, found.index) == ("constant", 1, (1, 1))
    assert str(found).startswith("a constant of the program holds 1 NaN of 64 numbers in float32")
    assert "\n  read at: test_find_overflow.py:" in str(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_part(check_vma: bool) -> None:
    """Each takes its own branch, and turns as often as it has to; none of it may be made up."""

    def mapped(local: Any) -> Any:
        specs = {"in_specs": (P("data"),), "out_specs": P("data")}
        fun = jax.shard_map(local, mesh=MESH, check_vma=check_vma, **specs)
        return lambda p: jnp.sum(lax.stop_gradient(fun(p["first"])))

    def branch(x: Any) -> Any:
        here = lax.axis_index("data") == 3
        return lax.cond(here, lambda x: jnp.log(x * 0), lambda x: x, x)

    def loop(x: Any, large: float = 1.0) -> Any:
        """Device 7 turns seven times; if the first did, it would overflow."""
        last = lax.axis_index("data").astype(jnp.float32)
        factor = jnp.where(last == 7, large, 1e12)
        turns = jnp.where(last == 7, 7.0, 1.0)
        start = (turns * 0, x * factor * 0 + 1)

        def body(c: Any) -> Any:
            return c[0] + 1, c[1] * factor  # in the fifth

        return lax.while_loop(lambda c: c[0] < turns, body, start)[1]

    found = find_overflow(mapped(branch), PARAMS)
    assert (found.operation, found.shape) == ("cond", (1, N))
    assert find_overflow(mapped(loop), PARAMS) is None
    found = find_overflow(mapped(lambda x: loop(x, 1e8)), PARAMS)
    name = "test_devices_that_part.loop.body"
    assert (found.line, found.turns) == (line_of("in the fifth", name), (4,))


def test_what_else_skips_a_step() -> None:
    """An infinite norm of finite gradients, and new collections."""
    found = find_overflow(lambda p: jnp.sum(p["first"]) * 1e20, PARAMS)
    assert found.reaches == ("norm",)
    assert "then not finite: the norm of all gradients" in str(found)

    def with_statistics(p: Any, x: Any) -> Any:
        return jnp.sum(p["first"]), {"mean": jnp.sum(x) / 0}

    found = find_overflow(with_statistics, PARAMS, X, has_aux=True)
    assert (found.operation, found.reaches) == ("div", ("aux/mean",))


@pytest.mark.exhaustive
def test_an_explicit_mesh_without_a_policy_or_a_context() -> None:
    params, x = jax.device_put((PARAMS, X), NamedSharding(EXPLICIT, P("data")))
    assert find_overflow(lambda p, x: jnp.sum(x @ p["first"]) / 0, params, x).operation == "div"


@pytest.mark.exhaustive
@pytest.mark.parametrize("inside", [False, True])
def test_a_shard_map_on_explicit_axes(inside: bool) -> None:
    """The mesh as JAX makes it; params are on one device, and the batch too in a context."""
    split, specs = NamedSharding(EXPLICIT, P("data")), {"in_specs": (P(), P("data"))}
    local = lambda w, x: blow_up(layer(x, w))  # noqa: E731
    run = jax.shard_map(local, mesh=EXPLICIT, out_specs=P("data"), **specs)
    with jax.set_mesh(EXPLICIT) if inside else contextlib.nullcontext():
        x = X if inside else jax.device_put(X, split)
        fun = lambda p, x: end(run(p["first"], jax.reshard(x, split)))  # noqa: E731
        found = find_overflow(fun, PARAMS, x)
    assert (found.line, found.shape) == (line_of("planted", "blow_up"), (1, N))


@pytest.mark.exhaustive
def test_layers_that_are_not_finite_later_do_not_hide_an_overflow_before() -> None:
    """Params of the last of three layers are NaN, and the first overflows."""
    stacked = {"w": jnp.stack([PARAMS["first"]] * 3).at[2].set(jnp.nan)}

    def loss(p: Any, x: Any) -> Any:
        def body(carry: Any, both: Any) -> Any:
            (x, total), (w, counts) = carry, both
            h = x @ w
            term = jnp.where(counts, jnp.mean(w / 0), 0)
            return (jnp.tanh(h), total + term), None

        counted = jnp.array([True, False, False])
        return lax.scan(body, (x, 0.0), (p["w"], counted))[0][1]

    found = find_overflow(loss, stacked, X)
    assert (found.operation, found.turns) == ("div", (0,))


def test_a_logarithm_of_zero_keeps_its_name_whatever_its_sign() -> None:
    """A cross-entropy is minus a logarithm; a -inf that was given is squared."""
    found = find_overflow(lambda p, x: -jnp.mean(jnp.log(x @ p["first"] * 0)), PARAMS, X)  # zero
    assert (found.operation, found.reaches[0]) == ("log", "loss")
    batch = X.at[2, 2].set(-jnp.inf)
    found = find_overflow(lambda p, x: jnp.mean((x - p["first"]) ** 2), PARAMS, batch)
    assert (found.operation, found.line) == ("argument", "batch")


def test_results_have_their_own_names() -> None:
    """Params may be called as results are, and an aux that is not finite hides nothing."""
    params = {"norm": PARAMS["first"], "loss": PARAMS["second"], "aux": PARAMS["first"]}

    def loss(p: Any, x: Any) -> Any:
        total = end(blow_up(layer(x, p["norm"]))) + jnp.sum(p["loss"]) + jnp.sum(p["aux"])
        return total, jnp.sum(x) / 0

    found = find_overflow(loss, params, X, has_aux=True)
    assert found.line == line_of("planted", "blow_up")
    assert found.reaches == ("loss",) or "gradients/norm" in found.reaches
    assert found.gradients == 3
    steep_loss = lambda p, x: (end(steep(layer(x, p["norm"]))), jnp.sum(x) / 0)  # noqa: E731
    found = find_overflow(steep_loss, params, X, has_aux=True)
    assert (found.operation, found.reaches) == ("mul", ("gradients/norm",))


def test_what_nobody_reads_any_more_is_freed() -> None:
    """Whole models run one operation after the other: a chain needs no more memory at its end."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.sin(x)
        return x

    living: list[int] = []

    def watch(place: Any, operands: Any, results: list[Any]) -> list[Any]:
        living.append(len(jax.live_arrays()))
        return [None] * len(results)

    closed = jax.make_jaxpr(chain)(X)
    OneByOne(watch, lambda x, notes: None).run(read(closed), [RunValue(X, None)])
    assert living[-1] <= living[1]
