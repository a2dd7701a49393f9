"""Where two programs of one function part: by module, in order, in units of the last place."""

import json
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmp
import jaxmp.nnx
from jaxmp.diagnostics import compare, log_prob_gap

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

X = jax.random.normal(jax.random.key(0), (4, 8))
WS = [jax.random.normal(key, (8, 8)) / 3 for key in jax.random.split(jax.random.key(1), 3)]


def net(ws: Any, x: jax.Array, fault: float = 0.0, dtype: Any = jnp.float32) -> jax.Array:
    """Three layers; the fault is in the second."""
    h = x.astype(dtype)
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            h = jnp.tanh(h @ w.astype(dtype))
            h = h + jnp.asarray(fault, dtype) if i == 1 else h
    return jnp.sum(h.astype(jnp.float32))


@pytest.mark.jax
def test_the_first_module_that_differs_is_named() -> None:
    found = compare(lambda *a: net(*a, fault=1e-3), net, WS, X)
    assert [row.path for row in found.rows] == ["layer_0", "layer_1", "layer_2"]
    assert found.rows[0].ulps == found.rows[0].largest == 0
    assert found.first.path == "layer_1"
    assert found.unmatched == ()
    same = compare(net, net, WS, X)
    assert same.first is None
    assert same.results[0].ulps == 0
    assert "nothing is further apart" in str(same)


def test_units_are_those_of_the_coarser_dtype() -> None:
    """NumPy rounds by hand: bfloat16 keeps eight bits."""
    found = compare(lambda x: scoped(x, jnp.bfloat16), lambda x: scoped(x, jnp.float32), X)
    exact = np.asarray(X, np.float64) * 3
    off = np.asarray((X.astype(jnp.bfloat16) * 3).astype(jnp.float32), np.float64) - exact
    unit = 2.0**-7 * 2.0 ** np.floor(np.log2(np.sqrt(np.mean(exact**2))))
    row = found.rows[0]
    assert row.dtypes == ("bfloat16", "float32")
    assert row.ulps == pytest.approx(np.sqrt(np.mean(off**2)) / unit, rel=1e-3)
    assert row.largest == pytest.approx(np.abs(off).max() / unit, rel=1e-3)
    assert 0.1 < row.ulps < 1


def scoped(x: jax.Array, dtype: Any) -> jax.Array:
    with jax.named_scope("triple"):
        y = x.astype(dtype) * 3
    return y.astype(jnp.float32).sum()


def test_units_are_those_of_a_dtype_inside_of_a_scope() -> None:
    """What is rounded in a scope may leave it in float32."""

    def rounded(x: jax.Array, dtype: Any) -> jax.Array:
        with jax.named_scope("layer"):
            return jnp.sin((3 * x.astype(dtype)).astype(jnp.float32))

    found = compare(lambda x: rounded(x, jnp.bfloat16), lambda x: rounded(x, jnp.float32), X)
    assert found.rows[0].dtypes == ("float32", "float32")
    assert found.unit == "bfloat16"
    assert found.first is None or found.first.ulps < 10


def test_integers_and_zeros_that_differ_are_infinitely_apart() -> None:
    """Token 5000 is not near token 5001."""
    made = {"token": jnp.array([5000]), "mask": jnp.array([True]), "zero": jnp.ones(2), "n": 3}
    other = made | {"token": jnp.array([5001]), "zero": jnp.zeros(2)}
    found = compare(lambda: made, lambda: other)
    apart = {row.path: row.ulps for row in found.results}
    infinite = {"result/token": math.inf, "result/zero": math.inf}
    assert apart == {"result/mask": 0, "result/n": 0} | infinite


def test_scanned_layers_part_at_their_turn() -> None:
    def stack(ws: jax.Array, x: jax.Array, fault: float) -> jax.Array:
        def layer(h: jax.Array, pair: Any) -> Any:
            i, w = pair
            with jax.named_scope("block"):
                with jax.named_scope("up"):
                    up = jnp.tanh(h @ w)
                return h + jnp.where(i == 2, 1 + fault, 1) * up, None

        return jax.lax.scan(jax.checkpoint(layer), x, (jnp.arange(4), ws))[0]

    ws = jnp.stack([*WS, WS[0]])
    found = compare(lambda *a: stack(*a, 0.1), lambda *a: stack(*a, 0.0), ws, X)
    assert (found.first.path, found.first.turns) == ("block", (2,))
    assert [row.turns for row in found.rows] == [(i,) for i in range(4) for _ in range(2)]


def test_gradients_part_backward() -> None:
    exact, rounded = jax.grad(net), jax.grad(jaxmp.autocast(net, "mixed_bfloat16"))
    found = compare(rounded, exact, WS, X)
    assert {row.direction for row in found.rows} == {"forward", "backward"}
    assert {row.path for row in found.results} == {"result/0", "result/1", "result/2"}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(5)(x))
        return nn.Dense(3)(x)


def test_linen_against_plain_jax() -> None:
    """The name of the model stands in front of the paths of one program only."""
    model = Net()
    params = model.init(jax.random.key(0), X)

    def plain(params: Any, x: jax.Array) -> jax.Array:
        p = params["params"]
        for i in range(2):
            with jax.named_scope(f"Dense_{i}"):
                x = x @ p[f"Dense_{i}"]["kernel"] + p[f"Dense_{i}"]["bias"]
            x = jax.nn.relu(x) if i == 0 else x
        return x

    found = compare(model.apply, plain, params, X)
    assert [row.path for row in found.rows] == ["Net/Dense_0", "Net/Dense_1"]
    assert found.first is None
    assert found.unmatched == ()


def test_nnx_by_scopes_or_by_lines() -> None:
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))

    def run(model: Any) -> Any:
        graphdef, params = nnx.split(model)
        return lambda x: jnp.sum(nnx.merge(graphdef, params)(x) ** 2)

    by_line = compare(jaxmp.autocast(run(model), "mixed_bfloat16"), run(model), X)
    assert by_line.rows
    assert all("test_compare.py:" in row.path for row in by_line.rows)
    run_named = run(jaxmp.nnx.with_scopes(model))
    by_scope = compare(jaxmp.autocast(run_named, "mixed_bfloat16"), run_named, X)
    assert [row.path for row in by_scope.rows] == ["layers/0", "layers/1"]


def test_checkpoint_names_match_where_scopes_do_not() -> None:
    def one(x: jax.Array) -> jax.Array:
        with jax.named_scope("mine"):
            return checkpoint_name(2 * x, "hidden") + 1

    def two(x: jax.Array) -> jax.Array:
        return checkpoint_name(x + x + 1e-2, "hidden") + 1

    found = compare(one, two, X)
    assert [row.path for row in found.rows] == ["hidden"]
    assert found.first.path == "hidden"
    assert [(x.program, x.path) for x in found.unmatched] == [(1, "mine")]


def test_what_cannot_be_matched_is_said() -> None:
    def looped(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array) -> jax.Array:
            with jax.named_scope("turn"):
                return x / 2

        with jax.named_scope("shape"):
            y = x.T
        return jax.lax.while_loop(lambda x: jnp.max(x) > 1, turn, y)

    def other(x: jax.Array) -> jax.Array:
        with jax.named_scope("shape"):
            y = x + 0
        return y.T

    found = compare(looped, other, X)
    assert {(x.program, x.path) for x in found.unmatched} == {(1, ""), (1, "shape"), (2, "shape")}
    texts = " ".join(x.why for x in found.unmatched)
    assert "nothing is seen inside of this while" in texts
    assert "float32[8, 4]" in texts
    assert "the other program has [4, 8] here" in texts


def test_infinities_of_masks_are_equal_and_others_are_not() -> None:
    def masked(x: jax.Array, fault: float) -> jax.Array:
        with jax.named_scope("mask"):
            y = jnp.where(x > 0, x, -jnp.inf)
        return jnp.where(x == X[0, 0], fault, y)

    assert compare(lambda x: masked(x, 0.0), lambda x: masked(x, 0.0), X).first is None
    broken = compare(lambda x: masked(x, jnp.nan), lambda x: masked(x, 0.0), X)
    assert math.isinf(broken.first.ulps)
    assert json.loads(json.dumps(broken.as_dict(), allow_nan=False))["first"]["ulps"] is None


def test_other_arguments_for_the_second() -> None:
    """The same sequence in a larger batch."""
    found = compare(net, lambda ws, x: net(ws, x[:4]), WS, X, g_args=(WS, jnp.tile(X, (3, 1))))
    assert found.first is None
    assert len(found.rows) == 3


def test_two_meshes() -> None:
    mesh = jax.make_mesh((2,), ("data",))
    sharded = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    found = compare(net, net, WS, X, g_args=(WS, sharded), tolerance=4)
    assert [row.path for row in found.rows] == ["layer_0", "layer_1", "layer_2"]
    assert found.first is None


def test_the_gap_of_log_probabilities() -> None:
    """NumPy, from the definitions."""
    rng = np.random.default_rng(0)
    trainer = -rng.exponential(1, (5, 7))
    sampler = np.minimum(trainer + rng.normal(0, 0.5, (5, 7)), 0)
    mask = rng.random((5, 7)) < 0.7
    gap = log_prob_gap(trainer, sampler, mask=mask, band=(0.8, 1.25))
    ratio = np.exp((trainer - sampler)[mask])
    assert gap.tokens == mask.sum()
    assert gap.mean == pytest.approx(np.mean(np.abs(np.log(ratio))))
    assert gap.rms == pytest.approx(np.sqrt(np.mean(np.log(ratio) ** 2)))
    assert gap.largest == pytest.approx(np.abs(np.log(ratio)).max())
    assert gap.outside == pytest.approx(np.mean((ratio < 0.8) | (ratio > 1.25)))
    assert gap.k1 == pytest.approx(-np.mean(np.log(ratio)))
    assert gap.k3 == pytest.approx(np.mean(ratio - 1 - np.log(ratio)))


def test_probabilities_far_apart_are_plain_numbers() -> None:
    found = compare(lambda: -jnp.ones(3), lambda: -900 * jnp.ones(3), log_probs=lambda x: x)
    assert math.isinf(found.log_probs.k3)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["log_probs"]["k3"] is None


def test_log_probabilities_of_results() -> None:
    def score(ws: Any, x: jax.Array) -> Any:
        return {"log_probs": jax.nn.log_softmax(x @ ws[0])[:, 0]}

    low = jaxmp.autocast(score, "mixed_bfloat16")
    found = compare(low, score, WS, X, log_probs=lambda out: out["log_probs"], band=(0.999, 1.001))
    assert found.log_probs.tokens == 4
    assert 0 < found.log_probs.outside <= 1
    assert "log-probabilities of 4 tokens" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["log_probs"]["tokens"] == 4


def mean_of_relus(ws: Any, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def shifted(ws: Any, x: jax.Array) -> jax.Array:
    return mean_of_relus(ws, x + 0.05)


def in_another_order(ws: Any, x: jax.Array) -> jax.Array:
    return mean_of_relus([ws[0][::-1], *ws[1:]], x[:, ::-1])


@pytest.mark.parametrize("of", [lambda f: f, jax.grad], ids=["loss", "gradients"])
def test_it_says_whether_a_gap_is_rounding(of: Any) -> None:
    """Of policies and of orders of sums; a small shift is none, and neither is an integer."""
    low = jaxmp.autocast(mean_of_relus, "mixed_bfloat16")
    x = jax.random.normal(jax.random.key(3), (256, 8))
    assert compare(of(low), of(mean_of_relus), WS, x).gap.is_rounding
    assert compare(of(in_another_order), of(mean_of_relus), WS, x).gap.is_rounding
    for other in (low, mean_of_relus):
        found = compare(of(other), of(shifted), WS, x)
        assert not found.gap.is_rounding
        assert "do not explain it" in str(found)
    assert compare(of(low), of(low), WS, x, error_bar=False).gap is None


MANY = [jax.random.normal(key, (32, 32)) / 6 for key in jax.random.split(jax.random.key(5), 3)]
ROWS = jax.random.normal(jax.random.key(6), (64, 32))


def heads(ws: Any, x: jax.Array, off: float = 1.0) -> Any:
    """Twenty results, of which one is off."""
    return [off * (jnp.tanh(x @ ws[0]) @ ws[1]), *(i * (x @ ws[2]) for i in range(1, 20))]


def loss_and_gradients(ws: Any, x: jax.Array, off: float = 1.0) -> Any:
    """The loss is off, beside gradients whose roundings are larger."""

    def mean_of_squares(ws: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

    loss, grads = jax.value_and_grad(mean_of_squares)(ws[:2])
    return {"loss": off * loss, "grads": grads}


def parts(ws: Any, x: jax.Array, off: float = 1.0) -> Any:
    """Complex numbers among others, of which one is off."""
    y = jnp.tanh(x @ ws[0])
    return [y @ ws[1] + 1j * (off * y @ ws[2]), *(i * (x @ ws[2]) for i in range(1, 16))]


@pytest.mark.parametrize(
    ("fun", "off", "path"),
    [
        (heads, 1.03, "result/0"),
        (loss_and_gradients, 1.015, "result/loss"),
        (parts, 1.04, "result/0"),
    ],
    ids=["heads", "loss", "complex"],
)
def test_a_fault_in_one_result_of_many(fun: Any, off: float, path: str) -> None:
    """Each is judged by its own bar: in the mean of all the others, the fault is rounding."""
    low = jaxmp.autocast(fun, "mixed_bfloat16")
    right = compare(low, fun, MANY, ROWS).gap
    assert right.is_rounding
    assert right.unexplained == ()
    wrong = compare(low, lambda ws, x: fun(ws, x, off), MANY, ROWS).gap
    assert not wrong.is_rounding
    assert wrong.unexplained == (path,)
    assert f"do not explain it: {path}" in str(wrong)
    assert wrong.distance < 3 * wrong.deviation  # by which all together would be rounding


def test_a_gap_without_a_bar() -> None:
    """Integers differ by no rounding, nor does what has no partner; what has no derivative is
    compared all the same.
    """
    apart = compare(lambda x: {"a": x}, lambda x: {"b": x}, X)
    assert apart.gap.distance == math.inf
    assert compare(lambda x: x, lambda x: x, jnp.arange(3)).gap.is_rounding
    assert not compare(lambda x: x, lambda x: x + 1, jnp.arange(3)).gap.is_rounding
    cancelled = compare(jnp.log1p, lambda x: jnp.log(1 + x), jnp.abs(X) / 1e3).gap
    assert cancelled.is_rounding  # as large as the units of 1 + x
    updated = compare(lambda x: jax.new_ref(x)[...] * 2, lambda x: 2 * x, X)
    assert math.isnan(updated.gap.deviation)
    assert "no derivative" in str(updated)
    assert updated.results[0].ulps == 0
    chosen = compare(lambda x: jnp.floor(7.1 * x.astype(jnp.bfloat16)), lambda x: 7 * x, X).gap
    assert "test_compare.py" in chosen.uncounted[0]
    assert "floor" in chosen.uncounted[0]


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ValueError, match="by must be 'scope', 'line' or None"):
        compare(net, net, WS, X, by="module")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        compare(net, net, WS, X, tolerance=-1)
    with pytest.raises(ValueError, match="must have one shape"):
        log_prob_gap([-1.0], [-1.0, -2.0])
    with pytest.raises(ValueError, match="trainer has log-probabilities that are not finite"):
        log_prob_gap([-math.inf], [-1.0])
    with pytest.raises(ValueError, match="sampler has values up to 3"):
        log_prob_gap([-1.0], [3.0])
    with pytest.raises(ValueError, match="band must hold 1"):
        log_prob_gap([-1.0], [-1.0], band=(2.0, 3.0))
    with pytest.raises(ValueError, match="no token to compare"):
        log_prob_gap([-1.0], [-1.0], mask=[False])
