"""`compact_state`: moments in 16 and 8 bits under any optimizer, which sees float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._numerics.block_codes import block_of, blocks_of, decode, encode
from jaxmp._numerics.stochastic import hashed_words
from jaxmp.storage import compact_state, expanded_state
from tests.support.bits import tree_bits

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
    values = {name: rng.standard_normal(shape) * scale for name, shape in SHAPES.items()}
    return jax.device_put(jax.tree.map(np.float32, values))


@jax.jit
def coded(x: Any) -> Any:
    """A number for each, rounded by random words, and its codes."""
    codes = encode(x, hashed_words(x.shape, [jnp.uint32(0)]))
    return decode(codes), codes


def trained(tx: Any, steps: int = 60) -> tuple[Any, Any]:
    """Params that go toward a target under noisy gradients."""
    target = tree(0)
    params = jax.device_put(jax.tree.map(np.zeros_like, target))
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
    near, state = trained(compact_state(inner, dtype))
    stored = [x for x in jax.tree.leaves(state) if x.dtype == dtype]
    large = [x for x in jax.tree.leaves(exact_state) if jnp.size(x) >= 4096]
    assert len(stored) == len(large) > 0 or name == "adafactor"
    for key in SHAPES:
        moved = np.linalg.norm(exact[key])
        apart = np.linalg.norm(np.subtract(near[key], exact[key]))
        assert apart <= 0.05 * moved, (key, apart / moved)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 8.0), ("bfloat16", 4.0), ("int8", 2.05)])
def test_bytes_of_adam(dtype: Any, most: float) -> None:
    params = {"w": jnp.zeros((512, 1024), jnp.float32)}
    state = compact_state(optax.adam(1e-3), dtype).init(params)
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    assert total <= most * params["w"].size + 64


def test_what_is_small_stays() -> None:
    hyperparams = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    state = compact_state(hyperparams, "int8").init(tree(0))
    adam = state.codes.inner_state[0]
    assert adam.count.dtype == jnp.int32
    dtypes = {name: adam.nu[name].dtype.name for name in SHAPES}
    assert dtypes == {"dense": "int8", "rows": "int8", "stack": "int8", "bias": "float32"}
    small = compact_state(hyperparams, "int8", min_size=1).init(tree(0)).codes
    assert small.inner_state[0].mu["bias"].dtype == jnp.int8
    assert small.hyperparams["learning_rate"].dtype == jnp.float32


def test_a_state_of_bfloat16_params_is_computed_in_float32() -> None:
    """Adam makes moments like its params."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(0))
    seen = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.extend(x.dtype.name for x in jax.tree.leaves(state[0]))
        return optax.trace(0.9).update(updates, state, params)

    tx = compact_state(optax.GradientTransformation(optax.trace(0.9).init, update), "int8")
    state = tx.init(params)
    assert state.codes.trace["bias"].dtype == jnp.bfloat16
    tx.update(params, state)
    assert set(seen) == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        pytest.param("float32", 0.0, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 0.02, marks=pytest.mark.exhaustive),
        ("int8", 0.05),
    ],
)
def test_params_without_gradients_come_to_rest(dtype: Any, most: float) -> None:
    """Rows of rare words: one gradient, then none, beside rows that have one in each step.

    Moments in codes never vanish. With a square root for a fourth one, they would have moved those
    params by 14 learning rates more.
    """
    rare = (jnp.arange(64) % 2 == 1)[:, None]

    def end(tx: Any) -> Any:
        def step(carry: Any, i: Any) -> Any:
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (64, 128))
            grads = jnp.where(rare, jnp.where(i == 0, 1.0, 0.0), noise)
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        params = jnp.zeros((64, 128))
        start = params, tx.init(params)
        return jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(4000))[0][0])()[1::2]

    exact = end(optax.adam(1.0))
    assert abs(float(jnp.mean(exact)) + 6) < 0.1
    near = end(compact_state(optax.adam(1.0), dtype))
    assert abs(float(jnp.mean(near - exact))) <= most


def test_an_average_of_params_moves() -> None:
    """To nearest, a bfloat16 average with a weight of a thousandth stays where it was."""
    params = jnp.ones((64, 64), jnp.float32)
    tx = compact_state(optax.ema(0.999, debias=False), "bfloat16")
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(1000):
        _, state = update(params, state)
    average = float(jnp.mean(expanded_state(state).ema))
    assert abs(average - (1 - 0.999**1000)) < 0.002
    nearest = jnp.bfloat16(0)
    for _ in range(1000):  # positive control
        nearest = (0.999 * nearest.astype(jnp.float32) + 0.001).astype(jnp.bfloat16)
    assert float(nearest) < 0.4


def test_a_second_moment_decays() -> None:
    """With `b2=0.999` and no more gradients: rounded to nearest it would stay for ever."""
    tx = compact_state(optax.scale_by_adam(b2=0.999), "bfloat16")
    params = jnp.ones((64, 64), jnp.float32)
    state = tx.init(params)
    update = jax.jit(tx.update)
    _, state = update(params, state)
    for _ in range(2000):
        _, state = update(jnp.zeros_like(params), state)
    second = float(jnp.mean(expanded_state(state).nu))
    np.testing.assert_allclose(second, 0.001 * 0.999**2000, rtol=0.02)


def distances(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distance of the codes around each number, and the smallest of its block. In float64."""
    block = (1, 1, *(block_of(x.shape) or ()))[-2:]
    rows = np.abs(x.astype(np.float64)).reshape(-1, x.shape[-1])
    out, least = np.empty_like(rows), np.empty_like(rows)
    for i in range(0, len(rows), block[0]):
        for j in range(0, rows.shape[1], block[1]):
            part = rows[i : i + block[0], j : j + block[1]]
            code = np.minimum(np.floor(127 * (part / part.max()) ** 0.25), 126)
            unit = part.max() / 127**4
            out[i : i + block[0], j : j + block[1]] = ((code + 1) ** 4 - code**4) * unit
            least[i : i + block[0], j : j + block[1]] = unit
    return out.reshape(x.shape), least.reshape(x.shape)


CODED = [(64, 256), (103, 65), (3, 16, 128), (5, 7, 9), (1024,), (8, 100)]


@pytest.mark.parametrize("shape", CODED)
def test_codes_are_unbiased(shape: tuple[int, ...]) -> None:
    """The mean over words that are evenly spaced is the number, as near as so many can be."""
    count = 256
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) ** 5
    by = jax.jit(lambda word: decode(encode(jnp.asarray(x), jnp.full(shape, word, jnp.uint32))))
    words = (np.arange(count, dtype=np.uint32) * 2 + 1) * np.uint32(2**31 // count)
    mean = np.mean([np.asarray(by(word), np.float64) for word in words], 0)
    between, least = distances(x)
    bound = between / count + least + 1e-6 * np.abs(x)
    assert np.all(np.abs(mean - x) <= bound)
    # Positive control: to nearest, most are further away.
    nearest = np.asarray(by(np.uint32(2**31)), np.float64)
    assert np.mean(np.abs(nearest - x) <= bound) < 0.3


@pytest.mark.parametrize("shape", CODED)
def test_codes_are_near(shape: tuple[int, ...]) -> None:
    """A number and its code differ by less than one step, in its own block."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x.reshape(-1)[0] = 1e6  # an outlier spoils its own block alone
    near, codes = coded(x)
    assert codes.scales.shape == blocks_of(shape)
    off = np.abs(np.asarray(near, np.float64) - x)
    assert np.all(off <= distances(x)[0] + 1e-6 * np.abs(x))
    assert np.median(off) < 0.02 * np.median(np.abs(x))
    zero, _ = coded(np.zeros(shape, np.float32))
    np.testing.assert_array_equal(zero, np.zeros(shape))


def test_what_is_not_zero_does_not_become_zero() -> None:
    """Nothing is divided by second moments then."""
    x = np.full((8, 128), 1e-9, np.float32)
    x[0, 0], x[1, 1] = 1.0, 0.0
    down = np.full(x.shape, 2**32 - 1, np.uint32)
    codes = np.asarray(jax.jit(encode)(x, down).codes)
    assert codes[1, 1] == 0
    assert np.all((codes != 0) | (x == 0))


def test_what_is_not_finite_is_seen() -> None:
    for bad in (np.inf, np.nan):
        x = np.ones((64, 128), np.float32)
        x[3, 5] = bad
        assert not np.all(np.isfinite(coded(x)[0]))


def test_codes_of_the_first_state_are_computed_by_the_program() -> None:
    """Not while it is compiled, which takes minutes for a large model whose moments begin at zero.

    Random words of rounding are made by shifts.
    """
    tx = compact_state(optax.adam(1e-3), "int8")
    program = jax.jit(tx.init).lower(jnp.ones((128, 128))).compile()
    assert "shift-right-logical" in program.as_text()
    assert tree_bits(program(jnp.ones((128, 128)))) == tree_bits(tx.init(jnp.ones((128, 128))))


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
    moments = placed.inner.codes[0].mu
    assert placed.master["tiles"].spec == jax.P("data")
    assert moments["tiles"].spec == moments["few"].spec == jax.P("data")
    # The count, mu and nu, each of few and tiles: 4 rows of blocks on 8 devices, and 64.
    scales = [x for x in placed.inner.scales if isinstance(x, jax.NamedSharding)]
    assert [x.spec for x in scales] == [jax.P(None), jax.P("data")] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("axes", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize(
    "spec", [jax.P("data"), pytest.param(jax.P(None, "data"), marks=pytest.mark.exhaustive)]
)
@pytest.mark.slow
def test_the_same_on_any_mesh(dtype: Any, axes: Any, spec: jax.P) -> None:
    """Where devices have whole blocks, and where they have not."""
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "mixed_bfloat16", moments=dtype)
    w = jnp.asarray(np.random.default_rng(0).standard_normal((128, 256)), jnp.float32)
    mesh = jax.make_mesh((8,), ("data",), (axes,))
    sharding = jax.NamedSharding(mesh, spec)

    def run(w: Any) -> Any:
        state = jaxmp.TrainState.create(params={"w": w}, tx=tx)
        for i in range(3):
            state = jax.jit(lambda s, g: s.apply_gradients(g))(state, {"w": jnp.sin(w + i)})
        return tree_bits(state.params)

    assert run(w) == run(jax.device_put(w, sharding))


def averaged() -> optax.GradientTransformation:
    """A user's own: an average of the params beside a momentum."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        return updates, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state, params)

    copy = optax.GradientTransformation(lambda p: jax.tree.map(jnp.copy, p), update)
    return optax.chain(optax.sgd(0.1, momentum=0.9), copy)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (optax.contrib.schedule_free_adamw(1e-3), "z/large"),
        (optax.contrib.prodigy(), "params0/large"),
        (averaged(), "1/large"),
    ],
    ids=["schedule-free", "prodigy", "average"],
)
def test_params_in_8_bits_are_warned_of(inner: Any, name: str) -> None:
    """The params of a schedule-free AdamW were off by a third."""
    params = {"large": jnp.ones((64, 128)), "small": jnp.ones(4)}
    for init in (
        compact_state(inner, "int8").init,
        jaxmp.mixed_precision(inner, "bfloat16", moments="int8").init,
        jax.jit(jaxmp.mixed_precision(inner, "mixed_bfloat16", moments="int8").init),
    ):
        with pytest.warns(UserWarning, match=f"begins with what is made of params: {name}"):
            init(params)
    compact_state(inner, "bfloat16").init(params)  # no warning
    compact_state(inner, "int8").init({"small": jnp.ones(4)})  # stays float32


def test_moments_in_8_bits_are_not_warned_of() -> None:
    params = {"large": jnp.ones((64, 128))}
    decayed = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    for inner in (optax.adamw(1e-3), optax.contrib.muon(1e-2), decayed):
        jaxmp.mixed_precision(inner, "bfloat16", moments="int8").init(params)
    around_moments = optax.contrib.schedule_free(compact_state(optax.adam(1e-3), "int8"), 1e-3, 0.9)
    jaxmp.mixed_precision(around_moments, "bfloat16").init(params)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: compact_state(optax.sgd(0.1), "int4"), ValueError,
         "must be one of 'float32', 'bfloat16', 'int8', got 'int4'"),
        (lambda: compact_state(optax.MultiSteps(optax.sgd(0.1), 2), "int8").init(tree(0)),
         TypeError, "Put compact_state inside: optax.MultiSteps"),
        (lambda: compact_state(3, "int8"), TypeError, "inner must be an optax.Gradient"),
        (lambda: jaxmp.mixed_precision(
            optax.chain(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
            "bfloat16", moments="int8").init(tree(0)), TypeError, "sums gradients in its state"),
        (lambda: compact_state(compact_state(optax.adam(0.1), "int8"), "bfloat16")
         .init(tree(0)), TypeError, "already. Wrap each part of an optimizer once"),
        (lambda: compact_state(jaxmp.mixed_precision(optax.sgd(0.1), "bfloat16"), "int8")
         .init(tree(0)), ValueError, "mixed_precision must be the outermost"),
        (lambda: compact_state(optax.adam(0.1), "int8").update(
            tree(0), compact_state(optax.adam(0.1), "bfloat16").init(tree(0))), TypeError,
         r"the one that compact_state\(optimizer, 'int8'\).init returned, got RoundedState"),
        (lambda: encode(jnp.ones(3), jnp.ones(3, jnp.uint32)), ValueError, "no blocks"),
        (lambda: encode(jnp.ones((9, 7)), jnp.ones((9, 7), jnp.uint32)), ValueError, "no blocks"),
    ],
)  # fmt: skip
def test_errors(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
