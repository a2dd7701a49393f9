"""per_shard: local gradients under jit, summed in float32, whatever travels."""

import collections
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._numerics.tree import cast_floating
from jaxmp.sharding import per_shard
from tests.support.compiled import after_partitioning
from tests.support.mlp import assert_close, data, loss_fn, mlp
from tests.support.reduction_checks import GRID, MESH
from tests.support.references import mlp_loss_and_grads

pytestmark = pytest.mark.annotations

P = jax.P
FSDP = {"w1": P("data"), "b1": P(), "w2": P(None, "data"), "b2": P()}


def low_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The same in bfloat16, cast by the model."""
    return loss_fn(cast_floating(params, jnp.bfloat16), x, y)


def placed(mesh: Any, specs: Any, params: Any, *batch: Any, over: Any = "data") -> tuple[Any, ...]:
    """Arguments on their devices."""
    specs = {name: P() for name in params} if specs is None else specs
    params = {
        name: jax.device_put(x, jax.sharding.NamedSharding(mesh, specs[name]))
        for name, x in params.items()
    }
    rows = jax.sharding.NamedSharding(mesh, P(over))
    return params, *[jax.device_put(x, rows) for x in batch]


LAYOUTS: dict[str, tuple[Any, Any, Any]] = {
    "replicated": (MESH, "data", None),
    "replicated, said so": (MESH, "data", P()),
    "fsdp": (MESH, "data", FSDP),
    "tensor": (
        GRID, "data", {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}
    ),
    "fsdp and tensor": (
        GRID,
        "data",
        {"w1": P("data", "model"), "b1": P("model"), "w2": P("model", "data"), "b2": P("data")},
    ),
    "hybrid": (GRID, ("data", "model"), {"w1": P("data"), "b1": P("model"), "w2": P(), "b2": P()}),
}  # fmt: skip


@pytest.mark.parametrize("comm", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_numpy(layout: str, comm: Any) -> None:
    mesh, axis, specs = LAYOUTS[layout]
    params, (x, y) = mlp(), data()
    want_loss, want = mlp_loss_and_grads(params, x, y)
    fun = per_shard(loss_fn, mesh=mesh, axis=axis, specs=specs, comm_dtype=comm)
    shardings = specs if isinstance(specs, dict) else None
    args = placed(mesh, shardings, params, x, y, over=axis)
    loss, grads = jax.jit(fun)(*args)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    assert {g.dtype for g in jax.tree.leaves((loss, grads))} == {jnp.dtype("float32")}
    assert_close(grads, want, 3e-6 if comm is None else 1e-2)
    if shardings:
        for name, g in grads.items():
            want_sharding = jax.sharding.NamedSharding(mesh, shardings[name])
            assert g.sharding.is_equivalent_to(want_sharding, g.ndim), name


@pytest.mark.parametrize("scale", [None, 2.0**12])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_scales_and_microbatches(dtype: str, microbatches: int, scale: Any) -> None:
    params, (x, y) = mlp(), data()
    want_loss, want = mlp_loss_and_grads(params, x, y)
    options: dict[str, Any] = {"loss_scale": scale, "microbatches": microbatches}
    fun = per_shard(loss_fn, mesh=MESH, specs=FSDP, dtype=dtype, **options)
    loss, grads = jax.jit(fun)(*placed(MESH, FSDP, params, x, y))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(loss, want_loss, rtol=max(8 * eps, 2e-6))
    assert_close(grads, want, max(8 * eps, 3e-6))
    assert grads["w1"].dtype == jnp.float32


@pytest.mark.programs(80, reason="without jit, each operation of loss and sums is a program")
def test_without_jit() -> None:
    params, (x, y) = mlp(), data()
    want_loss, want = mlp_loss_and_grads(params, x, y)
    loss, grads = per_shard(loss_fn, mesh=MESH)(params, x, y)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    assert_close(grads, want, 3e-6)


# --- what travels, after partitioning ----------------------------------------------------------

_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def wires(function: Callable[..., Any], *args: Any) -> dict[tuple[str, str], int]:
    """Bytes of what collectives return on each device, by collective and dtype; no scalars."""
    text = after_partitioning(function, *args)
    found: dict[tuple[str, str], int] = collections.Counter()
    for shapes, name in _COLLECTIVE.findall(text):
        for dtype, dims in _SHAPE.findall(shapes):
            size = math.prod(int(d) for d in dims.split(",") if d)
            if size > 1:
                found[name, dtype] += size * (2 if dtype in ("bf16", "f16") else 4)
    return dict(found)


SIZE = sum(x.size for x in mlp().values())
NORM = sum(x.size for k, x in mlp().items() if k in ("b1", "b2"))


def test_sums_over_devices_are_float32() -> None:
    args = placed(MESH, None, mlp(), *data())
    plain = wires(jax.value_and_grad(low_loss), *args)
    assert plain == {("all-reduce", "bf16"): 2 * SIZE}  # positive control
    assert wires(per_shard(low_loss, mesh=MESH), *args) == {("all-reduce", "f32"): 4 * SIZE}
    cast = per_shard(loss_fn, mesh=MESH, dtype="bfloat16")
    assert wires(cast, *args) == {("all-reduce", "f32"): 4 * SIZE}


def test_half_the_bytes() -> None:
    """An all-reduce passes each byte on twice; an all-to-all and an all-gather once each."""
    args = placed(MESH, None, mlp(), *data())
    sent = wires(per_shard(low_loss, mesh=MESH, comm_dtype="bfloat16"), *args)
    assert sent == {("all-to-all", "bf16"): 2 * SIZE, ("all-gather", "bf16"): 2 * SIZE}
    assert sum(sent.values()) == 2 * 4 * SIZE / 2


def test_fully_sharded() -> None:
    """Params gathered in 16 bits, and nothing else but the sums of their gradients."""
    args = placed(MESH, FSDP, mlp(), *data())
    fun = per_shard(loss_fn, mesh=MESH, specs=FSDP, dtype="bfloat16")
    sharded = SIZE - NORM
    sent = wires(fun, *args)
    assert sent.pop(("all-gather", "bf16")) == 2 * sharded
    # A CPU has no reduce-scatter at this point: each device takes its share of an all-reduce.
    assert sent == {("all-reduce", "f32"): 4 * SIZE}
    half = per_shard(loss_fn, mesh=MESH, specs=FSDP, dtype="bf16", comm_dtype="bf16")
    assert wires(half, *args) == {
        ("all-gather", "bf16"): 2 * SIZE, ("all-to-all", "bf16"): 2 * SIZE
    }  # fmt: skip


@pytest.mark.parametrize("comm", [None, "bfloat16"])
def test_under_autocast(comm: Any) -> None:
    """Local gradients are float32 there from the start, and so is their sum."""
    params, (x, y) = mlp(), data()
    _, want = mlp_loss_and_grads(params, x, y)
    args = placed(MESH, None, params, x, y)
    fun = per_shard(jaxmp.autocast(loss_fn, "mixed_bfloat16"), mesh=MESH, comm_dtype=comm)
    assert_close(jax.jit(fun)(*args)[1], want, 3e-2)
    sums = {("all-reduce", "f32")} if comm is None else {
        ("all-to-all", "bf16"), ("all-gather", "bf16")
    }  # fmt: skip
    assert set(wires(fun, *args)) == sums


# --- numerics ----------------------------------------------------------------------------------


def test_a_case_built_to_lose() -> None:
    """One example on each device, all of one sign: the gradient of x @ w is the mean of x."""
    numbers = np.random.default_rng(0).integers(129, 256, (8, 64)) | 1
    x, w = np.float32(numbers / 128.0), np.ones(64, np.float32)
    want = numbers.astype(np.float64).mean(0) / 128

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    ring = np.zeros(64, jnp.bfloat16)
    for row in x:
        ring = ring + (row / 8).astype(jnp.bfloat16)
    baseline = np.linalg.norm(ring.astype(np.float64) - want)
    assert baseline > 1e-3 * np.linalg.norm(want)
    _, grad = jax.jit(per_shard(loss, mesh=MESH))(w, x)
    assert 10 * np.linalg.norm(np.asarray(grad, np.float64) - want) < baseline
    _, half = jax.jit(per_shard(loss, mesh=MESH, comm_dtype="bfloat16"))(w, x)
    np.testing.assert_array_equal(half, want.astype(np.float32).astype(jnp.bfloat16))


def test_small_gradients_survive_a_float16_wire() -> None:
    """They travel as they were scaled, and are unscaled after the sum."""
    w, x = jnp.ones(8, jnp.float16), jnp.full((8, 8), 2.0**-10, jnp.float16)

    def tiny(w: Any, x: Any) -> Any:
        return jnp.sum(x * w[None]).astype(jnp.float32) * 2.0**-20

    for scale, want in ((None, 0.0), (2.0**20, 2.0**-30)):
        fun = per_shard(tiny, mesh=MESH, comm_dtype="float16", loss_scale=scale)
        _, grad = jax.jit(fun)(w, x)
        np.testing.assert_array_equal(grad, np.full(8, want, np.float32))


def test_an_overflow_on_one_device_is_seen_by_all() -> None:
    params, (x, y) = mlp(), data()
    large = np.array(x)
    large[17] = 1e6
    for comm in (None, "bfloat16", "float16"):
        fun = jax.jit(per_shard(loss_fn, mesh=MESH, dtype="float16", comm_dtype=comm))
        _, grads = fun(*placed(MESH, None, params, large, y))
        assert not jaxmp.numbers.all_finite(grads)
        assert jaxmp.numbers.all_finite(fun(*placed(MESH, None, params, x, y))[1])


# --- the loss sees one part --------------------------------------------------------------------


def test_the_mean_of_what_a_mask_lets_through() -> None:
    x, w = data(16)[0], np.linspace(-1, 1, 8, dtype=np.float32)
    mask = np.float32([i % 5 < 2 and i >= 6 for i in range(16)])

    def errors(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) ** 2

    def of_all(w: Any, x: Any, mask: Any) -> Any:
        return jnp.sum(errors(w, x) * mask) / jnp.sum(mask)

    def of_means(w: Any, x: Any, mask: Any) -> Any:
        return jnp.sum(errors(w, x) * mask) / jnp.maximum(jnp.sum(mask), 1)

    def of_the_count(w: Any, x: Any, mask: Any) -> Any:
        return jnp.sum(errors(w, x) * mask) / lax.pmean(jnp.sum(mask), "data")

    want = jax.jit(jax.value_and_grad(of_all))(w, x, mask)
    got = jax.jit(per_shard(of_the_count, mesh=MESH))(w, x, mask)
    jax.tree.map(lambda g, h: np.testing.assert_allclose(g, h, rtol=2e-5), got, want)
    wrong, _ = jax.jit(per_shard(of_means, mesh=MESH))(w, x, mask)
    assert abs(wrong / want[0] - 1) > 0.1


def test_statistics_of_the_whole_batch() -> None:
    """A norm over the batch, its statistics made with pmean: derivatives go through them."""
    x, w = data(16)[0], np.linspace(-1, 1, 8, dtype=np.float32)

    def loss(w: Any, x: Any, mean: Callable[[Any], Any]) -> Any:
        h = x * w[None]
        center = mean(jnp.mean(h, 0))
        var = mean(jnp.mean((h - center[None]) ** 2, 0))
        return jnp.mean(jnp.tanh((h - center[None]) * lax.rsqrt(var + 1e-3)[None]) ** 2)

    want = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, lambda v: v)))(w, x)
    fun = per_shard(lambda w, x: loss(w, x, lambda v: lax.pmean(v, "data")), mesh=MESH)
    got = jax.jit(fun)(w, x)
    jax.tree.map(lambda g, h: np.testing.assert_allclose(g, h, rtol=1e-4, atol=1e-7), got, want)


def test_keys_and_aux() -> None:
    def loss(w: Any, batch: Any) -> Any:
        bits = jax.random.bernoulli(batch["key"], 0.5, (8,))
        other = jax.random.fold_in(jax.random.key(9), lax.axis_index("data"))
        aux = {"dropped": bits, "own": jax.random.normal(other), "rows": batch["x"].shape[0]}
        return jnp.sum(w) * jnp.mean(batch["x"]), aux

    batch = {"x": jnp.arange(16.0), "key": jax.random.key(1), "keys": jax.random.split(
        jax.random.key(2), 16)}  # fmt: skip
    fun = per_shard(loss, has_aux=True, mesh=MESH)
    (value, aux), grad = jax.jit(fun)(jnp.ones(2), batch)
    np.testing.assert_allclose((value, grad[0]), (15.0, 7.5))
    assert aux["dropped"].shape == (8, 8)
    assert len({tuple(row) for row in np.asarray(aux["dropped"])}) == 8
    assert len(set(np.asarray(aux["own"]))) == 8
    np.testing.assert_array_equal(aux["rows"], np.full(8, 2))
    fun = per_shard(loss, has_aux=True, mesh=MESH, microbatches=2)
    (value, aux), grad = jax.jit(fun)(jnp.ones(2), batch)
    np.testing.assert_allclose((value, grad[0]), (15.0, 7.5))
    assert aux["dropped"].shape == (8, 2, 8)
    assert len({tuple(row) for row in np.asarray(aux["dropped"]).reshape(16, 8)}) == 16


@pytest.mark.parametrize("argnums", [0, (1, 0), (1,), -1])
def test_arguments(argnums: Any) -> None:
    """Params in several arguments, keyword arguments, and arrays that are not split."""

    def fun(a: Any, b: Any, x: Any, table: Any, *, c: float = 2.0) -> Any:
        return jnp.mean(x @ a["w"]) * jnp.sum(b) * c + jnp.sum(table)

    a, b, table = (np.arange(n, dtype=np.float32) for n in (8, 3, 5))
    args = {"w": a}, b, data(16)[0], table
    want = jax.jit(jax.value_and_grad(fun, argnums))(*args, c=4.0)
    specs = {0: {"w": P("data")}, (1, 0): (None, {"w": P("data")}), (1,): (P(),), -1: P()}[argnums]
    got = jax.jit(per_shard(fun, argnums, mesh=MESH, specs=specs, batch_argnums=2))(*args, c=4.0)
    jax.tree.map(lambda g, h: np.testing.assert_allclose(g, h, rtol=1e-5), got, want)


def test_wide_gradients_stay_wide() -> None:
    params = {"c": jnp.ones(16, jnp.complex64), "f": 2.0}
    fun = per_shard(
        lambda p, x: jnp.mean(x) * jnp.real(jnp.sum(p["c"])) * p["f"], mesh=MESH, comm_dtype="bf16"
    )
    _, grads = jax.jit(fun)(params, jnp.ones(8))
    assert grads["c"].dtype == jnp.complex64
    np.testing.assert_allclose(grads["c"], np.full(16, 2.0))
    np.testing.assert_allclose(grads["f"], 16.0)


def test_traced_once() -> None:
    traces = []

    def loss(w: Any, x: Any) -> Any:
        traces.append(1)
        return jnp.mean(x) * w

    step = jax.jit(per_shard(loss, mesh=MESH, loss_scale=8.0))
    for i in range(3):
        step(jnp.float32(i), jnp.ones(8))
    assert len(traces) == 1


# --- what is refused ---------------------------------------------------------------------------


def test_batches_that_do_not_divide() -> None:
    w, fun = jnp.ones(8), per_shard(lambda w, x, **_: jnp.mean(x["a"] @ w), mesh=MESH)
    with pytest.raises(
        ValueError,
        match=r"batch leaf '1/a' has 12 examples, which the 8 devices "
        r"along \('data',\) do not divide.* a multiple of 8",
    ):
        fun(w, {"a": jnp.ones((12, 8))})  # fmt: skip
    with pytest.raises(ValueError, match=r"batch leaves '1/a' and '1/b' have 16 and 8 examples"):
        fun(w, {"a": jnp.ones((16, 8)), "b": jnp.ones(8)})
    with pytest.raises(ValueError, match=r"batch leaf '1/n' is a scalar"):
        fun(w, {"a": jnp.ones((16, 8)), "n": 3})
    with pytest.raises(ValueError, match=r"keyword argument 'mask' has 16 examples like the batch"):
        fun(w, {"a": jnp.ones((16, 8))}, mask=jnp.ones(16))
    with pytest.raises(ValueError, match="needs a positional batch argument"):
        fun(w)
    micro = per_shard(lambda w, x: jnp.mean(x @ w), mesh=MESH, microbatches=3)
    with pytest.raises(ValueError, match="the batch has 2 examples, which 3 microbatches"):
        micro(w, jnp.ones((16, 8)))


def test_meshes_that_do_not_fit() -> None:
    loss = lambda w, x: jnp.mean(x @ w)  # noqa: E731
    with pytest.raises(ValueError, match=r"axes of the mesh, which has \['data'\]; got 'batch'"):
        per_shard(loss, mesh=MESH, axis="batch")
    with pytest.raises(ValueError, match=r"one or more different axes"):
        per_shard(loss, mesh=MESH, axis=())
    manual = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Manual,))
    with pytest.raises(ValueError, match=r"got manual ones \(\['data'\]\).*gather_params"):
        per_shard(loss, mesh=manual)
    with pytest.raises(ValueError, match=r"w' names \['fsdp'\], but the mesh has \['data'\]"):
        per_shard(lambda p, x: loss(p["w"], x), mesh=MESH, specs=P("fsdp"))({"w": jnp.ones(8)}, 1)
    with pytest.raises(ValueError, match="has 1 dimensions, too few for its"):
        per_shard(loss, mesh=MESH, specs=P(None, "data"))(jnp.ones(8), jnp.ones((8, 8)))
    with pytest.raises(ValueError, match="specs must be a tree of PartitionSpec"):
        per_shard(loss, mesh=MESH, specs={"w": P()})(jnp.ones(8), jnp.ones((8, 8)))
    with pytest.raises(ValueError, match="comm_dtype must be bfloat16, float16 or None"):
        per_shard(loss, mesh=MESH, comm_dtype="float32")


@pytest.mark.usefixtures("unchecked")
def test_a_mesh_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, got a str"):
        per_shard(jnp.sum, mesh="data")  # type: ignore[arg-type]


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map(check_vma: bool) -> None:
    inner = per_shard(lambda w, x: jnp.mean(x @ w), mesh=MESH)
    run = jax.shard_map(
        lambda w, x: inner(w, x)[1], mesh=MESH, in_specs=(P(), P("data")), out_specs=P(),
        check_vma=check_vma,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"inside of a shard_map over \['data'\].*gather_params or"
    ):
        run(jnp.ones(8), jnp.ones((64, 8)))


def test_a_constraint_that_names_the_axis() -> None:
    def loss(w: Any, x: Any, spec: Any) -> Any:
        x = lax.with_sharding_constraint(x, jax.sharding.NamedSharding(GRID, spec))
        return jnp.mean(x @ w)

    w, x = jnp.ones(8), jnp.ones((16, 8))
    fine = per_shard(lambda w, x: loss(w, x, P(None, "model")), mesh=GRID)
    np.testing.assert_allclose(jax.jit(fine)(w, x)[1], np.ones(8))
    with pytest.raises(ValueError, match="spmd_axis_name") as error:
        per_shard(lambda w, x: loss(w, x, P("data")), mesh=GRID)(w, x)
    notes = "".join(error.value.__notes__)
    assert "leave these axes out of its sharding constraints" in notes


def test_losses_that_are_refused() -> None:
    x = jnp.ones((8, 8))
    with pytest.raises(TypeError, match="the loss must be a float scalar"):
        per_shard(lambda w, x: x @ w, mesh=MESH)(jnp.ones(8), x)
    with pytest.raises(TypeError, match="argument 0, leaf 'n', is int32"):
        per_shard(lambda p, x: jnp.mean(x), mesh=MESH)({"n": jnp.arange(8)}, x)
