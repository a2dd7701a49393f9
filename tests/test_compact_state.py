"""`compact_state`: moments in 16 and 8 bits under any optimizer, which sees float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._block_codes import Codes, block_of, blocks_of, decode, encode
from jaxmp._compact_state import Rounded
from jaxmp._stochastic import hashed_words
from tests.bits import tree_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax needs it

SHAPES = {"dense": (64, 256), "rows": (103, 65), "stack": (3, 16, 128), "bias": (256,)}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-4),
    "muon": lambda: optax.contrib.muon(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-3, 0, 50))
    ),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "partition": lambda: optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-2, momentum=0.9)},
        {"dense": "a", "rows": "b", "stack": "a", "bias": "b"},
    ),
}  # fmt: skip


def tree(seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)
        for name, shape in SHAPES.items()
    }


def random_words(shape: tuple[int, ...], seed: int = 0) -> Any:
    return hashed_words(shape, [jnp.uint32(seed)])


def trained(tx: Any, steps: int = 60) -> tuple[Any, Any]:
    """Params that go toward a target under noisy gradients."""
    target = tree(0)
    params = jax.tree.map(jnp.zeros_like, target)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, noise: Any) -> Any:
        grads = jax.tree.map(lambda p, t, n: p - t + 0.3 * n, params, target, noise)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, tree(i + 1))
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_trains_as_in_float32(name: str, dtype: Any) -> None:
    """Every optimizer goes the same way, with an error far below what its steps are."""
    inner = OPTIMIZERS[name]()
    exact, exact_state = trained(inner)
    near, state = trained(jaxmp.compact_state(inner, dtype))
    stored = [x for x in jax.tree.leaves(state, is_leaf=is_packed) if is_packed(x)]
    large = [x for x in jax.tree.leaves(exact_state) if jnp.size(x) >= 4096]
    assert len(stored) == len(large) > 0 or name == "adafactor"
    for key in SHAPES:
        moved = float(jnp.linalg.norm(exact[key]))
        apart = float(jnp.linalg.norm(near[key] - exact[key]))
        assert apart <= 0.05 * moved, (key, apart / moved)


def is_packed(x: Any) -> bool:
    return isinstance(x, (Rounded, Codes))


@pytest.mark.parametrize(("dtype", "most"), [("float32", 8.0), ("bfloat16", 4.0), ("int8", 2.05)])
def test_bytes_of_adam(dtype: Any, most: float) -> None:
    params = {"w": jnp.zeros((512, 1024), jnp.float32)}
    state = jaxmp.compact_state(optax.adam(1e-3), dtype).init(params)
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    assert total <= most * params["w"].size + 64


def test_what_is_small_stays() -> None:
    state = jaxmp.compact_state(optax.adam(1e-3), "int8").init(tree(0))
    adam = state.inner[0]
    assert adam.count.dtype == jnp.int32
    assert adam.mu["bias"].dtype == jnp.float32
    assert [type(adam.nu[name]).__name__ for name in SHAPES] == ["Codes", "Codes", "Codes",
                                                                "ArrayImpl"]  # fmt: skip
    small = jaxmp.compact_state(optax.adam(1e-3), "int8", min_size=1).init(tree(0))
    assert small.inner[0].mu["bias"].scales.shape == (2,)


def test_an_average_of_params_moves() -> None:
    """To nearest, a bfloat16 average with a weight of a thousandth stays where it was."""
    params = jnp.ones((64, 64), jnp.float32)
    tx = jaxmp.compact_state(optax.ema(0.999, debias=False), "bfloat16")
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(1000):
        _, state = update(params, state)
    average = float(jnp.mean(jaxmp.expanded_state(state).ema))
    assert abs(average - (1 - 0.999**1000)) < 0.002
    nearest = jnp.bfloat16(0)
    for _ in range(1000):  # positive control
        nearest = (0.999 * nearest.astype(jnp.float32) + 0.001).astype(jnp.bfloat16)
    assert float(nearest) < 0.4


def test_a_second_moment_decays() -> None:
    """With `b2=0.999` and no more gradients: rounded to nearest it would stay for ever."""
    tx = jaxmp.compact_state(optax.scale_by_adam(b2=0.999), "bfloat16")
    params = jnp.ones((64, 64), jnp.float32)
    state = tx.init(params)
    update = jax.jit(tx.update)
    _, state = update(params, state)
    for _ in range(2000):
        _, state = update(jnp.zeros_like(params), state)
    second = float(jnp.mean(jaxmp.expanded_state(state).nu))
    np.testing.assert_allclose(second, 0.001 * 0.999**2000, rtol=0.02)


@pytest.mark.parametrize(
    "shape", [(64, 256), (103, 65), (3, 16, 128), (5, 7, 9), (1024,), (8, 100)]
)
def test_codes_are_unbiased(shape: tuple[int, ...]) -> None:
    """The mean over many random words is the number, within what chance allows."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape) ** 3, jnp.float32)
    draw = jax.jit(lambda seed: decode(encode(x, hashed_words(shape, [seed]))))
    draws = jnp.stack([draw(jnp.uint32(i)) for i in range(400)])
    spread = jnp.maximum(jnp.std(draws, 0), 1e-7) / 20
    scale = float(jnp.max(jnp.abs(x)))
    off = jnp.abs(jnp.mean(draws, 0) - x)
    # What is below the first code becomes that: no more than 1/127**2 of the scale.
    assert bool(jnp.all(off <= 6 * spread + scale / 127**2))


@pytest.mark.parametrize("shape", [(64, 256), (103, 65), (3, 16, 128), (1024,)])
def test_codes_are_near(shape: tuple[int, ...]) -> None:
    """A number and its code differ by less than one step, in its own block."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x.reshape(-1)[0] = 1e6  # an outlier spoils its own block alone
    codes = encode(jnp.asarray(x), random_words(shape))
    assert codes.scales.shape == blocks_of(shape)
    back = np.asarray(decode(codes))
    step = np.abs(x) * 2 * np.sqrt(4.0 / np.maximum(np.abs(x), 1e-6)) / 127 + 4.0 / 127**2
    rows = np.abs(back - x).reshape(-1)
    assert np.mean(rows <= step.reshape(-1)) > 1 - 2 * np.prod(block_of(shape)) / x.size
    zero = decode(encode(jnp.zeros(shape, jnp.float32), random_words(shape)))
    np.testing.assert_array_equal(zero, np.zeros(shape))


def test_what_is_not_zero_does_not_become_zero() -> None:
    x = jnp.full((8, 128), 1e-9, jnp.float32).at[0, 0].set(1.0).at[1, 1].set(0.0)
    codes = encode(x, jnp.full(x.shape, 2**32 - 1, jnp.uint32)).codes
    assert codes[1, 1] == 0
    assert bool(jnp.all((codes != 0) | (x == 0)))


def test_what_is_not_finite_is_seen() -> None:
    for bad in (jnp.inf, jnp.nan):
        x = jnp.ones((64, 128), jnp.float32).at[3, 5].set(bad)
        assert not bool(jnp.all(jnp.isfinite(decode(encode(x, random_words(x.shape))))))


def test_in_mixed_precision() -> None:
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "bfloat16", master="remainder", moments="int8")
    state = jaxmp.TrainState.create(params=tree(0), tx=tx)
    before = tree_bits((state.params, state.opt_state.master, state.opt_state.inner))
    step = jax.jit(lambda state, grads: state.apply_gradients(grads))
    skipped = step(state, jax.tree.map(lambda x: x * jnp.inf, tree(1)))
    after = skipped.params, skipped.opt_state.master, skipped.opt_state.inner
    assert tree_bits(after) == before
    taken = step(skipped, tree(1))
    assert tree_bits(taken.params) != tree_bits(state.params)


def test_state_shardings() -> None:
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    params = {
        "tiles": jax.ShapeDtypeStruct((512, 256), jnp.bfloat16),
        "few": jax.ShapeDtypeStruct((32, 256), jnp.bfloat16),
    }
    shardings = jax.tree.map(lambda _: jax.NamedSharding(mesh, jax.P("data")), params)
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bfloat16", master="remainder", moments="int8")
    state = jax.eval_shape(tx.init, params)
    placed = jaxmp.sharding.state_shardings(state, params, shardings)
    moments = placed.inner.inner[0].mu
    assert placed.master["tiles"].low16.spec == jax.P("data")
    assert moments["tiles"].codes.spec == jax.P("data")
    assert moments["tiles"].scales.spec == jax.P("data")  # 64 rows of blocks
    assert moments["few"].codes.spec == jax.P("data")
    assert moments["few"].scales.spec == jax.P(None)  # 4 rows of blocks, on 8 devices


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_same_on_any_mesh(dtype: Any) -> None:
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "mixed_bfloat16", moments=dtype)
    w = jnp.asarray(np.random.default_rng(0).standard_normal((128, 256)), jnp.float32)
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data"))

    def run(w: Any) -> Any:
        state = jaxmp.TrainState.create(params={"w": w}, tx=tx)
        for i in range(3):
            state = jax.jit(lambda s, g: s.apply_gradients(g))(state, {"w": jnp.sin(w + i)})
        return tree_bits(state.params)

    assert run(w) == run(jax.device_put(w, sharding))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: jaxmp.compact_state(optax.sgd(0.1), "int4"), ValueError,
         "must be one of 'float32', 'bfloat16', 'int8', got 'int4'"),
        (lambda: jaxmp.compact_state(optax.MultiSteps(optax.sgd(0.1), 2), "int8"), TypeError,
         "Put compact_state inside: optax.MultiSteps"),
        (lambda: jaxmp.compact_state(3, "int8"), TypeError, "takes an optax.Gradient"),
        (lambda: jaxmp.mixed_precision(optax.MultiSteps(optax.sgd(0.1), 2), "bfloat16",
                                       moments="int8"), TypeError, "sums gradients in its state"),
        (lambda: encode(jnp.ones(3), jnp.ones(3, jnp.uint32)), ValueError, "no blocks"),
        (lambda: encode(jnp.ones((9, 7)), jnp.ones((9, 7), jnp.uint32)), ValueError, "no blocks"),
    ],
)  # fmt: skip
def test_errors(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
