"""What modules hand on is counted as if each value had been returned."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxmp
from jaxmp.diagnostics import activation_histograms, histograms, underflow_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.annotations,
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion"),
]
MORE = pytest.mark.exhaustive
RNG = np.random.default_rng(0)
N, WIDTH = 6, 4
X = jnp.asarray(RNG.normal(size=(N, WIDTH)), jnp.float32)
WEIGHTS = jnp.asarray(RNG.normal(size=(3, WIDTH, WIDTH)), jnp.float32)


def rows(found: Any) -> dict[str, Any]:
    return {name: (found.counts[i], found.largest[i]) for i, name in enumerate(found.names)}


def check(found: Any, name: str, *values: Any) -> None:
    """The row of this name counts these values, and no others."""
    counts, largest = rows(found)[name]
    expected = histograms(list(values))
    assert np.array_equal(counts, expected.counts.sum(0)), name
    assert largest == expected.largest.max()


def layer(w: Any, x: Any) -> Any:
    with jax.named_scope("layer"):
        with jax.named_scope("product"):
            h = x @ w
        return jnp.sin(h)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    with jax.named_scope("inside"):
        return 2 * x


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def with_call(call: Any) -> Any:
    return lambda w, x: call(layer)(w, x)


def with_shardings(fun: Any) -> Any:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return jax.jit(fun, out_shardings=jax.NamedSharding(mesh, jax.P()))


@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(f, marks=MORE) for f in (lambda f: f, jax.checkpoint, with_shardings)),
        jax.jit,
    ],
    ids=["inline", "checkpoint", "shardings", "jit"],
)
def test_a_module_and_the_one_around_it(call: Any) -> None:
    """A value counts for the modules that it leaves: `h` for the product alone."""
    found = activation_histograms(with_call(call), WEIGHTS[0], X)
    assert found.names == ("layer/product", "layer")
    check(found, "layer/product", X @ WEIGHTS[0])
    check(found, "layer", jnp.sin(X @ WEIGHTS[0]))


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def outputs_of_layers() -> list[Any]:
    values, x = [], X
    for w in WEIGHTS:
        values += [x @ w]
        x = jnp.sin(values[-1])
        values += [x]
    return values


@pytest.mark.parametrize("by_turn", [pytest.param(False, marks=MORE), True])
def test_layers_in_a_scan(by_turn: bool) -> None:
    found = activation_histograms(scanned, WEIGHTS, X, by_turn=by_turn)
    values = outputs_of_layers()
    if not by_turn:
        assert found.names == ("layer/product", "layer")
        check(found, "layer/product", *values[::2])
        check(found, "layer", *values[1::2])
        return
    assert found.names == (
        *(f"layer/product[{i}]" for i in range(3)),
        *map("layer[{}]".format, range(3)),
    )
    for turn in range(3):
        check(found, f"layer/product[{turn}]", values[2 * turn])
        check(found, f"layer[{turn}]", values[2 * turn + 1])


def test_what_jax_adds_under_vmap_has_no_row() -> None:
    """It turns the axes of the result, outside of the module and of all lines."""
    found = activation_histograms(jax.vmap(layer, (0, None)), WEIGHTS, X)
    assert found.names == ("layer/product", "layer")
    check(found, "layer", *(jnp.sin(X @ w) for w in WEIGHTS))


@pytest.mark.exhaustive
def test_a_scan_in_a_scan_has_two_numbers() -> None:
    def twice(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (scanned(w, x), None), x, length=2)[0]

    found = activation_histograms(twice, WEIGHTS, X, by_turn=True)
    assert len(found.names) == 12
    check(found, "layer[0][2]", outputs_of_layers()[-1])


def test_a_loop_adds_its_turns() -> None:
    def loop(w: Any, x: Any) -> Any:
        def turn(state: Any) -> Any:
            return state[0] + 1, layer(w[state[0]], state[1])

        return jax.lax.while_loop(lambda state: state[0] < 3, turn, (0, x))[1]

    found = activation_histograms(loop, WEIGHTS, X)
    check(found, "layer", *outputs_of_layers()[1::2])


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=MORE)])
def test_of_a_branch_the_one_that_is_taken(index: int) -> None:
    def branches(i: Any, x: Any) -> Any:
        def first(x: Any) -> Any:
            with jax.named_scope("first"):
                return x + 1

        def second(x: Any) -> Any:
            with jax.named_scope("second"):
                return x * 3

        return jax.lax.switch(i, [first, second], x)

    found = activation_histograms(branches, jnp.int32(index), X)
    assert found.names == ("first", "second")
    check(found, found.names[index], [X + 1, X * 3][index])
    assert not found.counts[1 - index].any()


def test_a_function_with_a_derivative_of_its_own() -> None:
    check(activation_histograms(lambda x: doubled(x) + 1, X), "inside", 2 * X)


@pytest.mark.exhaustive
def test_loops_and_branches_on_devices() -> None:
    """What devices share counts once, and each device its own turns."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(x: Any, b: Any) -> Any:
        with jax.named_scope("shared"):
            b = 2 * b

        def turn(state: Any) -> Any:
            with jax.named_scope("turn"):
                return state[0] + 1, state[1] * 0.5

        turns = 1 + jax.lax.axis_index("data")
        x = jax.lax.while_loop(lambda state: state[0] < turns, turn, (0, x))[1]
        return jax.lax.cond(turns > 1, doubled, lambda x: x, x) + b

    specs = (jax.P("data"), jax.P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))
    found = activation_histograms(mapped, X, WEIGHTS[0, 0])
    check(found, "shared", 2 * WEIGHTS[0, 0])
    first, second = X[: N // 2], X[N // 2 :]
    check(found, "turn", first / 2, second / 2, second / 4)
    check(found, "inside", second / 2)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=MORE)])
def test_on_devices_each_number_counts_once(check_vma: bool) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def local(x: Any) -> Any:
        with jax.named_scope("rows"):
            y = 2 * x
        return y + 1

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=check_vma
    )
    check(activation_histograms(mapped, X), "rows", 2 * X)


def plain(w: Any, x: Any) -> Any:
    h = x @ w[0]
    return jnp.sum(jax.nn.relu(h))


def test_outside_of_modules_each_line_hands_on_its_values() -> None:
    first = plain.__code__.co_firstlineno + 1
    found = activation_histograms(plain, WEIGHTS, X)
    file = "test_activation_histograms.py"
    assert found.names == (f"{file}:{first} (plain)", f"{file}:{first + 1} (plain)")
    check(found, found.names[0], X @ WEIGHTS[0])
    check(found, found.names[1], plain(WEIGHTS, X))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(WIDTH, name="inner")(x)
        return nn.Dense(2, name="head")(jnp.tanh(x))


def test_modules_of_linen_under_a_policy() -> None:
    """Under float16 the values are float16, and the report says what is not seen."""
    model = Model()
    params = model.init(jax.random.key(0), X)
    found = activation_histograms(lambda p, x: jnp.sum(model.apply(p, x)), params, X)
    check(
        found,
        "Model/inner",
        model.apply(params, X, capture_intermediates=True)[1]["intermediates"]["inner"]["__call__"][
            0
        ],
    )
    low = activation_histograms(model.apply, params, X, policy="mixed_float16")
    assert low.dtypes[low.names.index("Model/inner")] == "float16"
    assert "what float16 had lost before is not seen" in str(underflow_report(low))


def test_modules_of_nnx() -> None:
    graphdef, params = nnx.split(nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0)))
    found = activation_histograms(lambda p, x: nnx.merge(graphdef, p)(x), params, X)
    check(found, found.names[-1], nnx.merge(graphdef, params)(X))


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda f: f, marks=MORE), jax.checkpoint],
    ids=["plain", "checkpoint"],
)
def test_the_backward_pass_has_rows_of_its_own(wrap: Any) -> None:
    """Cotangents and gradients; what is computed again for it does not count twice."""

    def loss_fn(w: Any, x: Any) -> Any:
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = wrap(lambda w, x: jnp.sin(x @ w))(w[f"{i}"], x)
        return jnp.sum(x**2)

    w = {"0": WEIGHTS[0], "1": WEIGHTS[1]}
    found = activation_histograms(jax.grad(loss_fn), w, X)
    first = jnp.sin(X @ w["0"])
    grads = jax.grad(loss_fn)(w, X)
    (cotangent,) = jax.grad(lambda x: jnp.sum(jnp.sin(x @ w["1"]) ** 2), argnums=(0,))(first)
    check(found, "layer_0", first)
    check(found, "layer_1 (backward)", cotangent, grads["1"])
    check(found, "layer_0 (backward)", grads["0"])


def test_under_jit_every_so_many_steps() -> None:
    @jax.jit
    def step(i: Any, w: Any, x: Any) -> Any:
        return activation_histograms(scanned, w, x, when=i % 2 == 0)

    found = step(0, WEIGHTS, X)
    check(found, "layer", *outputs_of_layers()[1::2])
    assert not step(1, WEIGHTS, X).counts.any()
    with pytest.raises(TypeError, match="when must be a boolean scalar"):
        activation_histograms(scanned, WEIGHTS, X, when=2)


def test_an_underflow_shows_in_the_module_where_it_begins() -> None:
    """Planted: the second layer multiplies by 1e-8, and float16 has nothing left of it."""

    def model(w: Any, x: Any) -> Any:
        for i, factor in enumerate((1.0, 1e-8, 1.0)):
            with jax.named_scope(f"layer_{i}"):
                x = factor * jnp.sin(x @ w[i])
        return x

    report = underflow_report(activation_histograms(model, WEIGHTS, X), dtype="float16")
    shares = {row.name: row.flushed for row in report.rows}
    assert shares == {"layer_0": 0, "layer_1": 1, "layer_2": pytest.approx(1, abs=0.1)}


def test_a_function_without_floats_has_no_rows() -> None:
    assert activation_histograms(lambda n: n + 1, jnp.int32(1)).counts.shape == (0, 128)
    assert jaxmp.diagnostics.underflow_report(activation_histograms(lambda x: x, X)).rows == ()
