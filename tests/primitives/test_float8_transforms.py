"""Products in float8 under JAX's transformations, and on several devices."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from tests.support.dots import equations
from tests.support.float8_references import error
from tests.support.reduction_checks import MESH

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("blocks_on_a_cpu")]

RECIPES = ["tensorwise", "rowwise", "rowwise_hp", "int8", "int8:weight_gradient=int8", "mxfp8"]
IN_BFLOAT16 = ["rowwise_hp", "int8"]  # their gradients of weights
# One kind of scales on the newest jax, too: what they multiply is the same.
each_recipe = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tensorwise", marks=pytest.mark.jax),
        *RECIPES[1:3],
        pytest.param("int8", marks=pytest.mark.jax),
        RECIPES[4],
        pytest.param("mxfp8", marks=pytest.mark.jax),
    ],
)
NUMBERS = (((1,), (0,)), ((), ()))


def dot(recipe: str | None, parameter: int = 1) -> Callable[[Any, Any], Any]:
    return functools.partial(
        jaxmp.float8.dot_general, dimension_numbers=NUMBERS, recipe=recipe, parameter=parameter
    )


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    """Normal numbers: the first array in bfloat16, others in float32."""
    random = np.random.default_rng(seed)
    arrays = [random.normal(size=shape) / 4 for shape in shapes]
    return [jax.device_put(x.astype("float32" if i else "bfloat16")) for i, x in enumerate(arrays)]


def scaled(x: Any, sizes: Any, axis: int = 0) -> jax.Array:
    """Stacked multiples of an array, rounded to its dtype."""
    parts = [np.asarray(x, np.float32) * np.float32(size) for size in sizes]
    return jax.device_put(np.stack(parts, axis).astype(x.dtype))


X, W = draw((32, 32), (32, 64))
V = jax.device_put((np.roll(X, 1, axis=0), np.roll(W, 2, axis=1)))


def loss(recipe: str | None) -> Callable[[Any, Any], Any]:
    """Something with second derivatives by both operands."""
    return lambda x, w: jnp.sum(jnp.sin(dot(recipe)(x, w).astype(jnp.float32)))


def loss32(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.sin(x.astype(jnp.float32) @ w))


def same(got: Any, want: Any) -> None:
    """Equal trees, bit for bit."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@each_recipe
def test_forward_mode(recipe: str) -> None:
    """`jvp` and `linearize` are derivatives, which no `custom_vjp` has; 12 % is two roundings."""
    y, t = jax.jvp(dot(recipe), (X, W), V)
    full = lambda x, w: x.astype(jnp.float32) @ w  # noqa: E731
    y32, t32 = jax.jvp(full, (X, W), V)
    assert (y.dtype, t.dtype) == (jnp.bfloat16, jnp.bfloat16)
    same(y, dot(recipe)(X, W))
    assert error(y, y32) < 0.06
    assert 1e-3 < error(t, t32) < 0.12
    same(jax.linearize(dot(recipe), X, W)[1](*V), t)
    for i in range(2):
        only = tuple(v if i == j else np.zeros_like(v) for j, v in enumerate(V))
        assert error(jax.jvp(dot(recipe), (X, W), only)[1], jax.jvp(full, (X, W), only)[1]) < 0.12


def forward_over_reverse(f: Any, v: Any) -> Any:
    return jax.jvp(jax.grad(f, (0, 1)), (X, W), v)[1]


def reverse_over_reverse(f: Any, v: Any) -> Any:
    def along(x: Any, w: Any) -> Any:
        found = jax.grad(f, (0, 1))(x, w)
        return sum(
            jnp.vdot(g.astype(jnp.float32), a.astype(jnp.float32))
            for g, a in zip(found, v, strict=True)
        )

    return jax.grad(along, (0, 1))(X, W)


@each_recipe
@pytest.mark.parametrize("mode", [forward_over_reverse, reverse_over_reverse])
def test_second_derivatives(recipe: str, mode: Any) -> None:
    """With the mixed ones, against those of float32."""
    zero = jax.tree.map(np.zeros_like, V)
    for direction in (V, (V[0], zero[1]), (zero[0], V[1])):
        got, want = (jax.jit(functools.partial(mode, f))(direction) for f in (loss(recipe), loss32))
        assert [a.dtype for a in got] == [jnp.bfloat16, jnp.float32]
        assert max(map(error, got, want)) < 0.12


def test_blocks_of_a_shared_weight_lie_along_all_rows() -> None:
    """Unlike scales of tensors and rows: of elements with 24 rows, a block has rows of two."""
    sizes = np.float32([1, 2**-8, 2**4])
    x = scaled(np.asarray(X)[:24], sizes)

    def total(w: Any, x: Any) -> Any:
        return jnp.sum(jax.vmap(loss("mxfp8"), (0, None))(x, w) / sizes)

    gradient = jax.jit(jax.grad(loss("mxfp8"), 1))
    each = [np.asarray(gradient(*pair, W)) / size for *pair, size in zip(x, sizes, strict=True)]
    assert 1e-3 < error(jax.jit(jax.grad(total))(W, x), sum(each)) < 0.1


@pytest.mark.jax
def test_linear_transpose() -> None:
    ct = np.ones((32, 64), jnp.bfloat16)
    (dw,) = jax.linear_transpose(lambda w: dot("tensorwise")(X, w), W)(ct)
    (dx,) = jax.linear_transpose(lambda x: dot("tensorwise")(x, W), X)(ct)
    same([dx, dw], jax.vjp(dot("tensorwise"), X, W)[1](ct))


@pytest.mark.jax
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_hp", "int8", "mxfp8"])
def test_a_tangent_in_the_rule_of_a_custom_jvp(recipe: str) -> None:
    """There the codes and the scale of a tangent both depend on it, and are transposed."""

    @jax.custom_jvp
    def linear(x: Any, w: Any) -> Any:
        return dot(recipe)(x, w)

    def rule(primals: Any, tangents: Any) -> Any:
        (x, w), (dx, dw) = primals, tangents
        return linear(x, w), dot(recipe)(dx, w) + dot(recipe)(x, dw)

    linear.defjvp(rule)

    def loss(function: Any) -> Any:
        return lambda x, w: jnp.sum(function(x, w).astype(jnp.float32) ** 2)

    got = jax.jit(jax.grad(loss(linear), (0, 1)))(X, W)
    want = jax.jit(jax.grad(loss(jnp.matmul), (0, 1)))(np.asarray(X, np.float32), W)
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(np.asarray(x, np.float32) - y) < 0.12 * np.linalg.norm(y)
    (dw,) = jax.linear_transpose(jax.jit(lambda w: dot(recipe)(X, w)), W)(
        np.ones((32, 64), jnp.bfloat16)
    )
    assert dw.dtype == jnp.float32


AXES = {"both": (0, 0), "x": (0, None), "w": (None, 0), "last axes": (-1, -1)}


@each_recipe
@pytest.mark.parametrize("name", AXES)
def test_vmap_is_a_loop(recipe: str, name: str) -> None:
    """Forward and gradients: each element of the batch has its own scales.

    To the bit where products are of codes. Where they are of 16-bit operands, a CPU may add up a
    batch of them in another order.
    """
    axes = AXES[name]
    sizes = (1.0, 2.0**-10, 2.0**6)
    ct = draw((32, 64), seed=3)[0]
    batches = [
        a if axis is None else scaled(a, sizes, axis) for a, axis in zip((X, W), axes, strict=True)
    ]

    def run(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(dot(recipe), x, w)
        return y, *pull(ct)

    got = map(np.asarray, jax.vmap(run, axes)(*batches))
    for i, result in enumerate(zip(*got, strict=True)):
        each = [
            b if axis is None else b.take(i, axis) for b, axis in zip(batches, axes, strict=True)
        ]
        if recipe in IN_BFLOAT16:
            chex.assert_trees_all_close(result, run(*each), rtol=1e-5, atol=1e-6)
        else:
            same(result, run(*each))


@each_recipe
def test_gradients_of_vmap(recipe: str) -> None:
    """Gradients of what is shared add up; those of each element are their own.

    Blocks of the shared one lie along all rows: those of one element if its rows fill them.
    """
    xs = scaled(X, (1, 2**-8, 2**4))

    def total(xs: Any, w: Any) -> Any:
        return jnp.sum(jax.vmap(loss(recipe), (0, None))(xs, w))

    jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    dxs, dw = jit(jax.grad(total, (0, 1)))(xs, W)
    gradient = jit(jax.grad(loss(recipe), (0, 1)))
    each = [[np.asarray(a) for a in gradient(x, W)] for x in xs]
    same(dxs, np.stack([dx for dx, _ in each]))
    assert error(dw, sum(dw for _, dw in each)) < 1e-6
    ws = scaled(W, (1, 3))
    twice = jax.vmap(jax.vmap(dot(recipe), (None, 0)), (0, None))(xs, ws)
    assert twice.shape == (3, 2, 32, 64)
    same(np.asarray(twice)[1, 1], dot(recipe)(xs[1], ws[1]))


SQUARE = draw((24, 32), (3, 32, 32), seed=1)


def same_but_for_sums(recipe: str, got: Any, want: Any) -> None:
    """Equal bits; but where gradients of weights are in bfloat16, fusions change its roundings."""
    if recipe in IN_BFLOAT16:
        assert error(got[-1], want[-1]) < 1e-2
        got, want = got[:-1], want[:-1]
    same(got, want)


def layers(recipe: str, x: Any, ws: Any) -> Any:
    """Three layers, with functions between them that compilers fuse with what is around them."""
    for w, function in zip(ws, (jnp.sin, jnp.tanh, jax.nn.gelu), strict=True):
        x = function(dot(recipe)(x, w))
    return x


def gradients(f: Any) -> Callable[[Any, Any], Any]:
    def run(x: Any, ws: Any) -> Any:
        y, pull = jax.vjp(f, x, ws)
        return y, *pull(jnp.ones_like(y))

    return run


@each_recipe
def test_scan_is_a_loop(recipe: str) -> None:
    """To the bit, as scales and codes depend on nothing but an array."""
    x, ws = SQUARE

    def scanned(x: Any, ws: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(dot(recipe)(c, w)), None), x, ws)[0]

    def unrolled(x: Any, ws: Any) -> Any:
        for w in ws:
            x = jnp.tanh(dot(recipe)(x, w))
        return x

    got, want = (jax.jit(gradients(f))(x, ws) for f in (scanned, unrolled))
    assert [str(a.dtype) for a in got] == ["bfloat16", "bfloat16", "float32"]
    same_but_for_sums(recipe, got, want)


@each_recipe
@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "everything_saveable"])
def test_checkpoint_changes_no_bit(recipe: str, policy: str) -> None:
    """What is computed again is the same: scales depend on nothing but the array."""
    x, ws = SQUARE
    chain = functools.partial(layers, recipe)
    remat = jax.checkpoint(chain, policy=getattr(jax.checkpoint_policies, policy))
    got, want = (jax.jit(gradients(f))(x, ws) for f in (remat, chain))
    same_but_for_sums(recipe, got, want)


@pytest.mark.jax
def test_checkpoint_policies_see_the_product() -> None:
    """The forward product is an ordinary one, of float8: policies save it, and do not repeat it."""
    x, ws = SQUARE

    def chain(x: Any, ws: Any) -> Any:
        for w in ws:
            x = jnp.sin(dot("tensorwise")(x, w))
        return jnp.sum(x.astype(jnp.float32))

    def count(f: Any) -> int:
        found = equations(jax.make_jaxpr(jax.grad(f, (0, 1)))(x, ws))
        names = [
            e.primitive.name for e in found if e.invars and e.invars[0].aval.dtype.itemsize == 1
        ]
        return names.count("dot_general")

    saveable = jax.checkpoint_policies.dots_saveable
    assert count(chain) == 3 + 2 * 3
    assert count(jax.checkpoint(chain)) == 3 + 2 * 3 + 3
    assert count(jax.checkpoint(chain, policy=saveable)) == 3 + 2 * 3


@pytest.mark.slow
@each_recipe
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_jit_changes_no_bit(recipe: str, dtype: str) -> None:
    """What is rounded to float8 is what the program says, and not what a fusion has before it.

    The compiler leaves out a rounding to bfloat16 where `tanh` and the next cast are fused.
    """
    x, ws = SQUARE
    run = gradients(functools.partial(layers, recipe))
    got, want = jax.jit(run)(x.astype(dtype), ws), run(x.astype(dtype), ws)
    if dtype == "bfloat16":
        same_but_for_sums(recipe, got, want)
    else:  # functions of float32 differ in their last digits, so that a code may move
        assert max(map(error, got, want)) < 1e-2


def exact_operands(recipe: str) -> tuple[Any, Any, Any]:
    """Integers that stay exact in every sum, and one outlier in x and in the cotangent.

    The outlier takes the scale of the whole array: small odd numbers become even ones. With a scale
    of their own, as a shard without the outlier has, they would stay.
    """
    random = np.random.default_rng(0)
    x = random.integers(-15, 16, (64, 32)).astype(np.float32)
    w = random.integers(-3, 4, (32, 16)).astype(np.float32)
    ct = random.integers(-15, 16, (64, 16)).astype(np.float32)
    # Alone in its row and column, so that no sum has it beside small numbers.
    x[5], x[:, 7], ct[42], ct[:, 3] = 0, 0, 0, 0
    x[5, 7] = ct[42, 3] = 2.0**9 if recipe.startswith("int8") else 2.0**19
    return jax.device_put((x.astype("bfloat16"), w, ct.astype("bfloat16")))


def pass_of(recipe: str) -> Callable[..., Any]:
    """The loss, the result and both gradients."""

    def run(x: Any, w: Any, ct: Any) -> Any:
        y, pull = jax.vjp(dot(recipe), x, w)
        signs = jnp.where(jnp.arange(y.shape[1]) % 2 == 0, 1.0, -1.0)
        inner = jnp.where(jnp.abs(y.astype(jnp.float32)) < 2**14, y.astype(jnp.float32), 0)
        return jnp.sum(inner * signs[None]), y, *pull(ct)

    return run


# Derivatives in e4m3, whose range is narrow enough that a scale matters for these integers.
MESH_RECIPES = [
    "tensorwise:gradient=float8_e4m3fn",
    "rowwise",
    "rowwise_hp",
    "int8:power_of_two=true",
]
SHARDINGS = {
    "data": (P("data"), P(), P("data")),
    "weights stored in parts": (P("data"), P("data"), P("data")),
    "columns": (P(), P(None, "data"), P(None, "data")),
    "sums": (P(None, "data"), P("data"), P()),
}


@pytest.mark.jax
@pytest.mark.parametrize("recipe", MESH_RECIPES)
@pytest.mark.parametrize("name", SHARDINGS)
def test_sharded_arrays_give_the_bits_of_one_device(recipe: str, name: str) -> None:
    """Under `jit` a scale is that of the whole array, wherever its parts lie.

    Loss, result and gradients: sums of these integers are exact in any order, so that nothing but
    scales and codes can differ.
    """
    args = exact_operands(recipe)
    placed = [
        jax.device_put(x, NamedSharding(MESH, spec))
        for x, spec in zip(args, SHARDINGS[name], strict=True)
    ]
    run = jax.jit(pass_of(recipe))
    want, got = run(*args), run(*placed)
    same(got, want)
    same(run(*map(np.asarray, args)), want)
    assert all(np.asarray(a, np.float32).any() for a in want)


@pytest.mark.jax
@pytest.mark.parametrize("recipe", [MESH_RECIPES[0], MESH_RECIPES[-1] + ":weight_gradient=int8"])
def test_scales_of_shards_would_give_other_bits(recipe: str) -> None:
    """Positive control: in a `shard_map` each shard has its scales, and these operands show it."""
    args = exact_operands(recipe)
    specs = (P("data"), P(), P("data"))
    outs = (P(), P("data"), P("data"), P())

    def local(x: Any, w: Any, ct: Any) -> Any:
        total, y, dx, dw = pass_of(recipe)(x, w, ct)
        return lax.psum(total, "data"), y, dx, lax.psum(dw, "data")

    sharded = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=outs, check_vma=False)
    got, whole = jax.jit(sharded)(*args), jax.jit(pass_of(recipe))(*args)
    for a, b in zip(got, whole, strict=True):
        assert not np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def weighted(recipe: str) -> Callable[[Any, Any], Any]:
    """A loss whose derivative does not depend on the result, whose roundings differ."""
    ct = draw((32, 64), seed=3)[0].astype(jnp.float32)
    return lambda x, w: jnp.vdot(dot(recipe)(x, w).astype(jnp.float32), ct)


@each_recipe
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(recipe: str, check_vma: bool) -> None:
    """The gradient of the weight is the float32 sum of what shards give, each with its scales."""
    x = np.concatenate(scaled(X, 2 ** np.arange(8)))

    def local(x: Any, w: Any) -> Any:
        if check_vma:
            return jax.grad(lambda w: lax.psum(weighted(recipe)(x, w), "data"))(w)
        return lax.psum(jax.grad(weighted(recipe), 1)(x, w), "data")

    specs = {"in_specs": (P("data"), P()), "out_specs": P(), "check_vma": check_vma}
    got = jax.jit(jax.shard_map(local, mesh=MESH, **specs))(x, W)
    each = jax.jit(jax.grad(weighted(recipe), 1))
    want = sum(np.asarray(each(part, W)) for part in np.split(x, 8))
    assert got.dtype == jnp.float32
    assert error(got, want) < 1e-6
    found = [
        e
        for e in equations(jax.make_jaxpr(jax.shard_map(local, mesh=MESH, **specs))(x, W))
        if "psum" in e.primitive.name
    ]
    assert {str(v.aval.dtype) for e in found for v in e.invars if v.aval.ndim > 1} == {"float32"}


@pytest.mark.jax
@pytest.mark.programs(45, reason="a shard_map that is differentiated outside of a jit, too")
def test_gradients_outside_of_a_shard_map() -> None:
    x = np.concatenate(scaled(X, 2 ** np.arange(8)))

    def total(w: Any, x: Any) -> Any:
        local = lambda w, x: lax.psum(weighted("tensorwise")(x, w), "data")  # noqa: E731
        return jax.shard_map(local, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())(w, x)

    each = jax.jit(jax.grad(weighted("tensorwise"), 1))
    want = sum(np.asarray(each(part, W)) for part in np.split(x, 8))
    assert error(jax.grad(total)(W, x), want) < 1e-6
    assert error(jax.jit(jax.grad(total))(W, x), want) < 1e-6


@pytest.mark.jax
def test_programs_for_gpus_are_exported() -> None:
    """`jax.export` refuses layouts, which a weight has in a program for one GPU."""
    gradient = jax.jit(jax.grad(weighted("tensorwise")))
    compiled = gradient.trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" in compiled  # the control: without export, it is there
    exported = jax.export.export(gradient, platforms=["cpu", "cuda", "tpu"])(X, W)
    np.testing.assert_array_equal(exported.call(X, W), gradient(X, W))
