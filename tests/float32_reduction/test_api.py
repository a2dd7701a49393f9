"""value_and_grad(reduce_dtype=): what it leaves as it was, and what it takes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from tests.support.bits import tree_bits
from tests.support.reduction_checks import MESH, compiled, relative_error, representable

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

F32, BF16 = jnp.float32, jnp.bfloat16
Tree = dict[str, Any]


def init(dtype: Any = F32) -> Tree:
    random = np.random.default_rng(0)
    params = {
        "w": random.normal(size=(16, 8)) / 4,
        "v": random.normal(size=(8, 4)) / 3,
        "b": np.full(8, 0.25),
    }
    return jax.tree.map(lambda x: jax.device_put(x.astype(BF16).astype(dtype)), params)


def data() -> Any:
    x = np.random.default_rng(1).normal(size=(64, 16))
    return jax.device_put(x.astype(BF16).astype(F32))


def loss_fn(params: Tree, x: Any, dtype: Any = BF16) -> Any:
    w, v, b = (params[name].astype(dtype) for name in ("w", "v", "b"))
    return jnp.mean((jnp.tanh(x.astype(dtype) @ w + b) @ v).astype(F32) ** 2)


def float32_loss(params: Tree, x: Any) -> Any:
    return loss_fn(jax.tree.map(lambda w: w.astype(F32), params), x, F32)


def reduced(fun: Callable[..., Any] = loss_fn, **options: Any) -> Callable[..., Any]:
    return jaxmp.value_and_grad(fun, reduce_dtype="float32", **options)


def test_is_exact_after_the_rounding_of_the_activations() -> None:
    """Against NumPy in float64, of one product with exact 16-bit operands."""
    x = np.asarray(data(), np.float64)
    w = np.asarray(init()["w"], np.float64)

    def dot(w: Any, x: Any) -> Any:
        return jnp.sum((x.astype(BF16) @ w.astype(BF16)).astype(F32) * 0.25)

    wanted = x.T @ np.full((64, 8), 0.25)
    plain = compiled(jax.grad(dot))(jnp.float32(w), jnp.float32(x))
    loss, ours = compiled(reduced(dot))(jnp.float32(w), jnp.float32(x))
    assert relative_error(ours, wanted) < 1e-6 < 1e-4 < relative_error(plain, wanted)
    np.testing.assert_array_equal(loss, compiled(dot)(jnp.float32(w), jnp.float32(x)))


@pytest.mark.parametrize("dtype", [BF16, jnp.float16], ids=["bfloat16", "float16"])
def test_params_of_sixteen_bits(dtype: Any) -> None:
    params, x = init(dtype), data()

    def low(params: Tree, x: Any) -> Any:
        return loss_fn(params, x, dtype)

    loss, grads = compiled(reduced(low, loss_scale=1.0))(params, x)
    np.testing.assert_array_equal(tree_bits(loss), tree_bits(compiled(low)(params, x)))
    wide = jax.tree.map(lambda w: np.asarray(w, F32), params)
    exact, plain = compiled(jax.grad(float32_loss))(wide, x), compiled(jax.grad(low))(params, x)
    assert relative_error(grads, exact) <= 1.1 * relative_error(plain, exact)
    for name, grad in grads.items():
        assert grad.dtype == F32
        assert name == "b" or representable(grad, dtype) < 0.6
        assert representable(np.asarray(plain[name], F32), dtype) == 1.0
    assert "b" not in grads or representable(grads["b"], dtype) < 1.0


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_leaves_the_reduction_as_it_is(dtype: Any) -> None:
    params, x = init(), data()
    with_dtype = compiled(jaxmp.value_and_grad(loss_fn, reduce_dtype=dtype))(params, x)
    assert tree_bits(with_dtype) == tree_bits(compiled(jaxmp.value_and_grad(loss_fn))(params, x))
    assert representable(with_dtype[1]["w"], BF16) == 1.0  # positive control


eager = pytest.mark.programs(70, reason="one operation at a time, as it is written")


@eager
@pytest.mark.parametrize("jitted", [False, True])
def test_traces_the_loss_once_and_runs_its_effects_once(jitted: bool) -> None:
    calls: list[int] = []
    seen: list[float] = []

    def counted(params: Tree, x: Any) -> Any:
        calls.append(1)
        loss = loss_fn(params, x)
        jax.debug.callback(lambda b: seen.append(float(b)), params["b"][0])
        jax.debug.callback(lambda value: seen.append(float(value)), loss, ordered=True)
        return loss

    fun = jax.jit(reduced(counted)) if jitted else reduced(counted)
    loss, _ = fun(init(), data())
    jax.effects_barrier()
    assert len(calls) == 1
    assert sorted(seen) == sorted([0.25, float(loss)])
    fun(init(), data())
    jax.effects_barrier()
    assert len(calls) == (1 if jitted else 2)
    assert len(seen) == 4


@eager
def test_effects_in_loops_and_branches(capfd: pytest.CaptureFixture[str]) -> None:
    def printing(params: Tree, x: Any) -> Any:
        def body(h: Any, _: None) -> Any:
            jax.debug.print("loop {} {}", params["b"][0], h[0, 0])
            return h + params["b"].astype(BF16), None

        h, _ = lax.scan(body, (x.astype(BF16) @ params["w"].astype(BF16)), None, length=3)

        def branch(h: Any) -> Any:
            jax.debug.print("branch {}", h[0, 0])
            return h * params["b"].astype(BF16)

        return jnp.mean(lax.cond(x[0, 0] < 100, branch, lambda h: h, h).astype(F32))

    reduced(printing)(init(), data())
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert printed.count("loop 0.25") == 3
    assert printed.count("branch") == 1


@eager
def test_leaves_of_every_kind_among_the_arguments() -> None:
    def odd(params: Tree, batch: Tree, mode: str, scale: float = 1.0, table: Any = None) -> Any:
        assert mode == "train"
        assert batch["nothing"] is None
        keep = jax.random.bernoulli(batch["key"], 0.5, (8,)) & batch["mask"]
        h = jnp.tanh(batch["x"].astype(BF16) @ params["w"].astype(BF16))
        h = jnp.where(keep, h, jnp.zeros_like(h)) * scale + table[batch["ids"]][:, None].astype(
            BF16
        )
        return jnp.mean(h.astype(F32) ** 2), {"name": mode, "count": batch["ids"].sum(), "fun": len}

    batch = {
        "x": data(),
        "key": jax.random.key(3),
        "mask": np.arange(8) < 6,
        "ids": np.arange(64) % 5,
        "nothing": None,
    }
    options: Tree = {"scale": 0.5, "table": jax.device_put(np.linspace(0, 1, 5))}
    fun = reduced(odd, has_aux=True)
    (loss, aux), grads = fun(init(), batch, "train", **options)
    plain_loss, _ = odd(init(), batch, "train", **options)
    plain = compiled(jax.grad(lambda *a: odd(*a, "train", **options)[0]))(init(), batch)
    np.testing.assert_array_equal(loss, plain_loss)
    assert aux["name"] == "train"
    assert aux["fun"] is len
    assert int(aux["count"]) == int(batch["ids"].sum())
    assert relative_error(grads, plain) < 2e-2
    assert not np.any(grads["v"])


def test_closures_over_arrays_and_tracers() -> None:
    shift = jax.device_put(np.full(8, 0.5, BF16))

    @jax.jit
    def outer(params: Tree, x: Any, gain: Any) -> Any:
        def closed(params: Tree) -> Any:
            h = x.astype(BF16) @ params["w"].astype(BF16) + shift
            return jnp.mean((h * gain.astype(BF16)).astype(F32) ** 2)

        return reduced(closed)(params), jax.value_and_grad(closed)(params)

    (loss, grads), (plain_loss, plain) = outer(init(), data(), jnp.float32(0.5))
    np.testing.assert_array_equal(loss, plain_loss)
    assert relative_error(grads, plain) < 2e-2
    assert representable(grads["w"], BF16) < 0.6


def test_several_arguments_and_their_order() -> None:
    def two(x: Any, w: Any, v: Any) -> Any:
        return loss_fn({"w": w, "v": v, "b": jnp.zeros(8)}, x)

    args = data(), init()["w"], init()["v"]
    loss, (v, w) = compiled(reduced(two, argnums=(2, 1)))(*args)
    _, only = compiled(reduced(two, argnums=-1))(*args)
    assert tree_bits(only) == tree_bits(v)
    assert v.shape == (8, 4)
    assert w.shape == (16, 8)
    np.testing.assert_array_equal(loss, compiled(two)(*args))


def test_wide_and_complex_leaves_are_left_alone() -> None:
    with jax.enable_x64(True):
        params = {
            "low": jnp.asarray(np.linspace(-1, 1, 128).reshape(16, 8), jnp.float32),
            "wide": jnp.asarray(np.linspace(-1, 1, 8), jnp.float64),
            "phase": jnp.asarray(np.exp(1j * np.arange(8)), jnp.complex64),
        }
        x = jnp.asarray(data(), jnp.float32)

        def mixed(params: Tree, x: Any) -> Any:
            h = (x.astype(BF16) @ params["low"].astype(BF16)).astype(jnp.float64)
            return jnp.mean(jnp.abs(h * params["wide"] + params["phase"]) ** 2)

        loss, grads = compiled(reduced(mixed))(params, x)
        plain_loss, plain = compiled(jax.value_and_grad(mixed))(params, x)
    assert loss.dtype == plain_loss.dtype == np.float64
    np.testing.assert_array_equal(loss, plain_loss)
    assert {name: str(g.dtype) for name, g in grads.items()} == {
        "low": "float32",
        "wide": "float64",
        "phase": "complex64",
    }
    np.testing.assert_allclose(grads["wide"], plain["wide"], rtol=1e-12)
    np.testing.assert_allclose(grads["phase"], plain["phase"], rtol=1e-6)
    assert representable(grads["low"], BF16) < 0.6


def test_params_of_eight_bits_are_used_as_they_are() -> None:
    """Rounded products of them too, which would differ if they were made of float32 copies."""
    values = np.linspace(0.3, 1.7, 8)
    params = {
        "s": values.astype(jnp.float8_e4m3fn),
        "t": values[::-1].astype(jnp.float8_e4m3fn),
        "w": jax.device_put(np.linspace(-1, 1, 128).reshape(16, 8)),
    }

    def quantized(params: Tree, x: Any) -> Any:
        scale = (params["s"] * params["t"]).astype(BF16)
        return jnp.mean((x.astype(BF16) @ params["w"].astype(BF16) * scale).astype(F32) ** 2)

    loss, grads = compiled(reduced(quantized))(params, data())
    plain_loss, plain = compiled(jax.value_and_grad(quantized))(params, data())
    np.testing.assert_array_equal(loss, plain_loss)
    np.testing.assert_array_equal(np.asarray(grads["s"], F32), np.asarray(plain["s"], F32))
    assert representable(grads["w"], BF16) < 0.6


def test_derivatives_are_taken_where_the_values_are() -> None:
    """The root of a difference that is positive for rounded params, and for float32 ones is not."""
    a, c = 1 + 8.6 / 128, 1 + 18.49 / 128
    assert a * a < c

    def root(params: Tree, x: Any) -> Any:
        low = {name: param.astype(BF16) for name, param in params.items()}
        return jnp.mean((jnp.abs(x).astype(BF16) * jnp.sqrt(low["a"] ** 2 - low["c"])).astype(F32))

    grads = compiled(jaxmp.grad(root, reduce_dtype="float32"))({"a": F32(a), "c": F32(c)}, data())
    # Rounded to 1 + 9 / 128 and 1 + 18 / 128; the square of the first to 1 + 19 / 128.
    slope = float(np.mean(np.abs(np.asarray(data(), np.float64)))) / np.sqrt(1 / 128)
    np.testing.assert_allclose(grads["a"], slope * (1 + 9 / 128), rtol=1e-2)
    np.testing.assert_allclose(grads["c"], -slope / 2, rtol=1e-2)


def derivatives(grad: Any, x: Any) -> Iterator[tuple[str, Any]]:
    """Functions of the params that differentiate, or batch, the gradient function again."""
    tangent = init() | {"b": jax.device_put(np.linspace(-1, 1, 8))}
    yield "jvp", lambda p: jax.jvp(lambda p: grad(p, x), (p,), (tangent,))[1]
    yield (
        "hvp",
        lambda p: jax.grad(
            lambda p: sum(
                jnp.vdot(a, b)
                for a, b in zip(*map(jax.tree.leaves, (grad(p, x), tangent)), strict=True)
            )
        )(p),
    )
    yield "jacfwd", lambda p: jax.jacfwd(lambda b: grad(p | {"b": b}, x))(p["b"])
    yield "jacrev", lambda p: jax.jacrev(lambda b: grad(p | {"b": b}, x)["b"])(p["b"])
    yield "vmap of batches", lambda p: jax.vmap(grad, (None, 0))(p, x.reshape(4, 16, 16))
    yield (
        "vmap of params",
        lambda p: jax.vmap(grad, (0, None))(jax.tree.map(lambda w: jnp.stack([w, w * 2]), p), x),
    )
    yield "scan", lambda p: lax.map(lambda x: grad(p, x), x.reshape(4, 16, 16))
    yield "remat", lambda p: jax.checkpoint(grad)(p, x)


@pytest.mark.parametrize("kind", [name for name, _ in derivatives(None, None)])
def test_derivatives_of_the_gradient(kind: str) -> None:
    x = data()
    ours, plain, exact = (
        compiled(dict(derivatives(grad, x))[kind])(init())
        for grad in (
            jaxmp.grad(loss_fn, reduce_dtype="float32"),
            jax.grad(loss_fn),
            jax.grad(float32_loss),
        )
    )
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    assert {g.dtype for g in jax.tree.leaves(ours)} == {jnp.dtype(F32)}
    assert relative_error(ours, exact) <= 1.1 * relative_error(plain, exact) < 0.05


def test_microbatches_and_loss_scale() -> None:
    params, x = init(), data()
    (whole_loss, whole), (loss, grads), (scaled_loss, scaled) = (
        compiled(reduced(**options))(params, x)
        for options in ({}, {"microbatches": 4}, {"loss_scale": 2.0**12})
    )
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-3)
    np.testing.assert_array_equal(scaled_loss, whole_loss)
    assert relative_error(grads, whole) < 1e-2
    assert relative_error(scaled, whole) < 1e-6  # a power of two
    assert representable(grads["w"], BF16) < 0.6


def test_an_overflow_is_seen() -> None:
    def overflows(params: Tree, x: Any) -> Any:
        return jnp.mean((x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(F32))

    _, grads = compiled(reduced(overflows, loss_scale=2.0**120))(init(), data())
    assert not np.all(np.isfinite(grads["w"]))


def test_dot_algorithms() -> None:
    def fun(params: Tree, x: Any) -> Any:
        y = lax.dot(
            x.astype(BF16),
            params["w"].astype(BF16),
            precision=lax.DotAlgorithmPreset.BF16_BF16_F32,
            preferred_element_type=F32,
        )
        return jnp.mean(jnp.tanh(y) ** 2)

    loss, grads = compiled(reduced(fun))(init(), data())
    plain_loss, plain = compiled(jax.value_and_grad(fun))(init(), data())
    np.testing.assert_array_equal(loss, plain_loss)
    assert relative_error(grads, plain) < 2e-2


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("float64", "gradients are reduced in float32, or in the dtype of the model; got float64"),
        ("float8_e4m3fn", "gradients are reduced in float32, or in the dtype of the model"),
        ("int8", "unknown dtype 'int8'. Valid names: float64, float32, bfloat16"),
        (3, "dtype"),
    ],
)
def test_says_what_a_reduce_dtype_can_be(dtype: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        jaxmp.value_and_grad(loss_fn, reduce_dtype=dtype)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_dictionaries_may_be_changed_as_under_jit(kind: Any) -> None:
    def changes(params: Tree, batch: Tree) -> Any:
        batch["x"] = batch.pop("y") * 2
        return loss_fn(params, batch["x"])

    batch = kind(x=np.zeros(3), y=np.asarray(data()) / 2)
    loss, grads = compiled(reduced(changes))(init(), batch)
    want, wanted = compiled(reduced())(init(), data())
    assert loss == want
    assert tree_bits(grads) == tree_bits(wanted)
    assert set(batch) == {"x", "y"}


@eager
def test_numpy_stays_numpy() -> None:
    """A program may depend on what is no array of JAX: as without a reduction, or by keyword."""

    def some(params: Tree, x: Any, mask: Any, rows: Any) -> Any:
        return loss_fn(params, x[mask][:rows])

    mask = np.arange(64) % 3 == 0
    loss, grads = reduced(some)(init(), data(), mask, np.int32(4))
    wanted_loss, wanted = reduced()(init(), jax.device_put(np.asarray(data())[mask][:4]))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert relative_error(grads, wanted) < 1e-4


def test_what_is_handed_on_is_what_it_was() -> None:
    """Numbers of NumPy, of 64 bits too, arrays that do not depend on the arguments, and others."""

    def some(params: Tree, x: Any, ids: Any) -> Any:
        made = {"ids": ids, "two": jnp.float32(2), "weak": jnp.asarray(1.0), "count": 3}
        return jnp.sum(params["b"]), made | {"rows": jnp.arange(3), "key": jax.random.key(1)}

    ids = np.array([2**40 + 5])
    (_, found), _ = reduced(some, has_aux=True)(init(), data(), ids)
    (_, wanted), _ = jax.value_and_grad(some, has_aux=True)(init(), data(), ids)
    assert found["ids"] is ids
    for name, x in wanted.items():
        assert type(found[name]) is type(x), name
        assert getattr(found[name], "weak_type", None) == getattr(x, "weak_type", None)
        assert np.all(found[name] == x), name


@pytest.mark.parametrize("spread", [True, False])
def test_activations_are_no_params(spread: bool) -> None:
    """A bias that is laid out before it is added changes no other gradient than its own."""

    def loss(params: Tree, x: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            w, b = p["w"].astype(BF16), p["b"].astype(BF16)
            h = h @ w
            h = h + (jnp.broadcast_to(b, h.shape) * 2 if spread else 2 * b)
            return jnp.tanh(h @ w), None

        return jnp.mean(jax.lax.scan(layer, x.astype(BF16), params)[0].astype(F32) ** 2)

    w = np.random.default_rng(2).normal(size=(3, 16, 16)) / 4
    params = jax.device_put({"w": w, "b": np.full((3, 16), 0.25)})
    x = data()
    products = {row.result: row.count for row in jaxmp.audit(jaxmp.grad(loss), params, x).products}
    ours = {row.result: row.count for row in jaxmp.audit(reduced(loss), params, x).products}
    assert products == {"bfloat16": 6}
    assert ours == {"bfloat16": 4, "float32": 2}  # those of the weights
    _, grads = compiled(reduced(loss))(params, x)
    assert representable(grads["b"], BF16) < 0.5


def test_the_state_of_modules_is_not_lost() -> None:
    """Whatever container they are in: what they change is an error."""

    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.calls = nnx.Variable(jnp.zeros(()))

    def counts(params: Tree, batch: Any) -> Any:
        batch["modules"][0].calls[...] += 1
        return loss_fn(params, batch["x"])

    with pytest.raises(Exception, match=r"in place|trace level"):
        reduced(counts)(init(), {"modules": [Counter()], "x": data()})


@jax.custom_vjp
def scaled_rows(x: Any, scale: Any) -> Any:
    return x * scale


scaled_rows.defvjp(
    lambda x, scale: (x * scale, (x, scale)),
    lambda saved, ct: jax.vjp(lambda x, scale: x * scale, *saved)[1](ct),
)


def branches(x: Any, p: Tree) -> Any:
    """No sum over devices may be in a branch that some of them do not take."""
    y = lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: x * p["b"])
    return y + x * lax.cond(x[0, 1] > 0, lambda: p["w"][0], lambda: jnp.zeros_like(p["w"][0]))


# Programs within an operation, and numbers of the program in a branch that devices take or not.
IN_SHARD_MAP: dict[str, Callable[[Any, Tree], Any]] = {
    "branches": branches,
    "custom_vjp": lambda x, p: scaled_rows(x, p["b"]),
    "custom_jvp": lambda x, p: jnp.logaddexp(x, p["b"]),
    "number": lambda x, p: x * lax.cond(x[0, 0] > 0, lambda b: b * 2, lambda b: b, p["b"]),
    "zeros": lambda x, p: x * lax.cond(x[0, 0] > 0, jnp.zeros_like, lambda b: 1 - b, p["b"]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", IN_SHARD_MAP)
def test_operations_in_a_shard_map(name: str) -> None:
    w = np.asarray(init()["w"])[:8]
    params, x = {"w": w, "b": w[:, 0]}, np.asarray(data())[:, :8]

    def loss(params: Tree, x: Any) -> Any:
        low = jax.tree.map(lambda p: p.astype(BF16), params)
        return jnp.mean(IN_SHARD_MAP[name](x.astype(BF16), low).astype(F32) ** 2)

    def local(params: Tree, x: Any) -> Any:
        return jaxmp.grad(lambda p: loss(p, x) / 8, reduce_dtype="float32")(params)

    mapped = jax.shard_map(local, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    parts = np.reshape(x, (8, -1, 8))
    assert 0 < np.sum(parts[:, 0, 0] > 0) < 8  # both branches are taken
    whole = jax.grad(lambda p: jnp.mean(jnp.stack([loss(p, part) for part in parts])))
    assert relative_error(compiled(mapped)(params, x), compiled(whole)(params)) < 1e-2


def test_a_jitted_layer_is_traced_once() -> None:
    """However often it is called, and whenever: also where nothing around it is jitted."""
    runs = []

    @jax.jit
    def layer(w: Any, x: Any) -> Any:
        runs.append(x.shape)
        return jnp.tanh(x @ w.astype(BF16))

    def deep(params: Tree, x: Any) -> Any:
        for _ in range(6):
            x = layer(params["w"], x)
        return jnp.mean(x.astype(F32) ** 2)

    params, x = {"w": jax.device_put(np.asarray(init()["w"])[:8])}, np.asarray(data(), BF16)[:, :8]
    grad = reduced(deep)
    functions = []
    for count, f in enumerate((grad, jax.value_and_grad(deep)), 1):
        text = jax.jit(f).lower(params, x).as_text()
        functions.append(text.count("func.func private @layer"))
        assert len(runs) == count  # JAX keeps what jaxmp reads apart from what others do
    assert functions[0] == functions[1]
    loss, grads = grad(params, x)
    again, grads_again = grad(params, x)
    assert loss == again == deep(params, x)
    assert tree_bits(grads) == tree_bits(grads_again)
    assert len(runs) == 2
