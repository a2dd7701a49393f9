"""Sensitivity finds the part that needs more bits, and its rules do what the report says."""

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
import jaxmp.nnx
from jaxmp._tools.diagnostics.sensitivity_report import SensitivityReport
from jaxmp.diagnostics import sensitivity
from tests.support.switched_roundings import measured_alone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

WIDTH = 16
HALVES = ("bfloat16", "float16")
OFFSET = 200.0  # bfloat16 has steps of 1 there


def plant(x: jax.Array, planted: bool) -> jax.Array:
    """Adds and takes off a large number: the identity, but for roundings."""
    return (x + OFFSET) * 1.0 - OFFSET if planted else x


def weights(count: int, seed: int = 0) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), count)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys]


BATCH = {
    "x": jax.random.normal(jax.random.key(1), (32, WIDTH)),
    "y": jax.random.normal(jax.random.key(2), (32, WIDTH)),
}


def squares(z: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((z - batch["y"]) ** 2)


def mlp(planted: int | None, layers: int = 4) -> tuple[Callable[..., Any], Any]:
    """Plain JAX with named scopes."""

    def loss_fn(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                h = jnp.tanh(plant(h @ w, i == planted))
        return squares(h, batch)

    return loss_fn, weights(layers)


class NnxBlock(nnx.Module):
    def __init__(self, planted: bool, rngs: nnx.Rngs) -> None:
        self.planted = planted
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(plant(self.up(x), self.planted)))


class NnxNet(nnx.Module):
    def __init__(self, planted: int | None, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([NnxBlock(i == planted, rngs) for i in range(2)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def live(planted: int | None) -> tuple[Callable[..., Any], Any]:
    """A live nnx model is the params."""
    return lambda model, batch: squares(model(batch["x"]), batch), NnxNet(planted, nnx.Rngs(0))


def scanned(planted: int | None) -> tuple[Callable[..., Any], Any]:
    """Layers in a rematerialized scan are one part; the parts in the layer are others."""

    def block(h: jax.Array, ws: Any) -> Any:
        with jax.named_scope("attend"):
            h = h + jnp.tanh(h @ ws["a"])
        with jax.named_scope("mlp"):
            return h + jnp.tanh(plant(h @ ws["b"], planted == 1)), None

    def loss_fn(params: Any, batch: Any) -> Any:
        with jax.named_scope("embed"):  # a stream that begins with data would stay float32
            h = batch["x"] @ params["embed"]
        with jax.named_scope("layers"):
            h, _ = jax.lax.scan(jax.checkpoint(block), h, params["stack"])
        with jax.named_scope("head"):
            h = h @ params["head"]
        return squares(h, batch)

    a, b = (jnp.stack(weights(3, seed)) for seed in (0, 1))
    embed, head = weights(2, 5)
    return loss_fn, {"stack": {"a": a, "b": b}, "embed": embed, "head": head}


@pytest.mark.jax
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (mlp, "layer_1"),
        pytest.param(scanned, "layers/mlp", marks=pytest.mark.exhaustive),
        pytest.param(live, "blocks/1", marks=pytest.mark.exhaustive),
    ],
)
def test_the_planted_part_is_first_and_kept(make: Any, path: str) -> None:
    """Without the fault, the same part is like the others: the positive control."""
    loss_fn, params = make(1)
    report = sensitivity(loss_fn, params, BATCH)
    assert report.rows[0].path == path
    assert report.rows[0].alone.gradients > 5 * report.rows[1].alone.gradients
    rules = report.rules_for(target=0.1)
    assert report.all_low.gradients > 0.1 >= report.errors(rules).gradients
    assert f"/{path}" in [pattern for pattern, _ in rules.rules]
    sound, params = make(None)
    before = {row.path: row.alone.gradients for row in sensitivity(sound, params, BATCH).rows}
    assert before[path] < report.rows[0].alone.gradients / 5


def gradients(loss_fn: Any, rules: Any, params: Any, batch: Any) -> np.ndarray:
    fun = jaxmp.autocast(loss_fn, rules)
    found = jaxmp.value_and_grad(fun)(params, batch)[1]
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(found)])


@pytest.mark.parametrize("confirm", [False, True])
def test_rules_meet_their_target_on_a_batch_that_was_not_used(confirm: bool) -> None:
    """NumPy measures what `jaxmp.autocast` does under the rules."""
    loss_fn, params = mlp(2)
    keys = jax.random.split(jax.random.key(7))
    other = {
        name: jax.random.normal(key, (32, WIDTH)) for name, key in zip("xy", keys, strict=True)
    }
    report = sensitivity(loss_fn, params, BATCH, confirm=confirm)
    for target in (0.1, 0.007):
        rules = report.rules_for(target)
        for batch in (BATCH, other):
            exact = gradients(loss_fn, "float32", params, batch)
            off = gradients(loss_fn, rules, params, batch) - exact
            error = float(np.linalg.norm(off) / np.linalg.norm(exact))
            assert error <= target
        assert report.errors(rules).gradients <= target


def test_errors_of_parts_are_those_that_were_measured() -> None:
    """Each part's roundings run alone in float32; with all of them the program itself runs."""
    loss_fn, params = mlp(None)
    report = sensitivity(loss_fn, params, BATCH, confirm=True)
    alone = measured_alone(loss_fn, params, BATCH)
    assert {row.path for row in report.rows} == set(alone)
    for row in report.rows:
        assert row.alone.gradients == pytest.approx(alone[row.path][1], rel=0.4)
    assert report.all_low.gradients == pytest.approx(report.measured.gradients, rel=0.3)
    squared = sum(row.alone.gradients**2 for row in report.rows)
    assert math.sqrt(squared) == pytest.approx(report.all_low.gradients, rel=0.4)


def test_other_dtypes_round_at_the_same_places() -> None:
    """float16 has three bits more; a program in float16 says the same."""
    loss_fn, params = mlp(None)
    low = {name: sensitivity(loss_fn, params, BATCH, low=f"mixed_{name}") for name in HALVES}
    for row in low["bfloat16"].rows:
        assert row.in_dtypes["float16"].gradients == pytest.approx(row.alone.gradients / 8, rel=0.3)
        other = next(x for x in low["float16"].rows if x.path == row.path)
        assert row.in_dtypes["float16"].gradients == pytest.approx(other.alone.gradients, rel=0.3)
        assert other.in_dtypes["bfloat16"].gradients == pytest.approx(row.alone.gradients, rel=0.3)


def test_operations_are_named_by_line() -> None:
    report = sensitivity(*mlp(1), BATCH)
    first = report.operations[0]
    assert first.path == "layer_1"
    assert first.line.startswith("test_sensitivity.py:")
    assert first.line.endswith("(plant)")
    assert (first.operation, first.direction) == ("add", "forward")


def test_the_loss_has_an_error_bar() -> None:
    loss_fn, params = mlp(None)
    bar = sensitivity(loss_fn, params, BATCH).loss
    exact, low = loss_fn(params, BATCH), jaxmp.autocast(loss_fn, "mixed_bfloat16")(params, BATCH)
    assert bar.value == pytest.approx(float(low), rel=1e-4)
    assert abs(float(low) - float(exact)) < 3 * bar.deviation < 0.01 * bar.value


def routed(params: Any, batch: Any) -> Any:
    with jax.named_scope("route"):
        best = jnp.argmax(batch["x"] @ params[0], -1)
    with jax.named_scope("layer"):
        h = batch["x"] @ params[1]
    return squares(h * (1 + best[:, None]), batch), {"accuracy": jnp.argmax(h, -1) == 0}


def test_choices_of_rounded_numbers_are_told() -> None:
    """Those that the loss depends on: the accuracy is not one of them."""
    report = sensitivity(routed, weights(2), BATCH, has_aux=True)
    (line,) = report.uncounted
    assert line.endswith("(routed): argmax")
    assert line.split()[0] in str(report)
    assert sensitivity(*mlp(None), BATCH).uncounted == ()


def test_parts_whose_errors_are_not_predicted_are_kept_by_measurement() -> None:
    """A `shard_map` is not looked into: the report says so, and `confirm` finds the rules."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    loss_fn, params = mlp(None)

    def mapped(params: Any, batch: Any) -> Any:
        local = jax.shard_map(
            lambda *a: loss_fn(*a)[None], mesh=mesh, in_specs=jax.P(), out_specs=jax.P()
        )
        return local(params, batch)[0]

    report = sensitivity(mapped, params, BATCH, confirm=True)
    assert any("shard_map" in line for line in report.uncounted)
    assert report.all_low.gradients < report.measured.gradients
    assert report.errors(report.rules_for(1e-4)).gradients <= 1e-4


def test_rules_of_the_user_are_tried() -> None:
    """What they keep is kept; what `rules_for` adds comes on top."""
    loss_fn, params = mlp(2)
    rules = jaxmp.PolicyRules({"layer_0": "float32"}, default="mixed_bfloat16")
    report = sensitivity(loss_fn, params, BATCH, low=rules)
    by_path = {row.path: row.alone.gradients for row in report.rows}
    everything = sensitivity(loss_fn, params, BATCH)
    before = {row.path: row.alone.gradients for row in everything.rows}
    assert by_path["layer_0"] < before["layer_0"]
    assert by_path["layer_2"] == pytest.approx(before["layer_2"], rel=0.2)
    kept = report.rules_for(0.1)
    assert kept.resolve("layer_0").compute_dtype == jnp.float32
    assert kept.resolve("layer_2").compute_dtype == jnp.float32
    assert kept.resolve("layer_3").compute_dtype == jnp.bfloat16


@pytest.mark.exhaustive
def test_overflow_in_float16_ranks_first() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        with jax.named_scope("huge"):
            h = (batch["x"] @ (params[0] * 1e5)) / 1e5
        with jax.named_scope("plain"):
            h = jnp.tanh(h @ params[1])
        return squares(h, batch)

    report = sensitivity(loss_fn, weights(2), BATCH, low="mixed_float16")
    assert report.rows[0].path == "huge"
    assert math.isinf(report.rows[0].alone.gradients)
    assert report.as_dict()["parts"][0]["alone"]["gradients"] is None
    assert "not finite" in str(report)
    assert report.errors(report.rules_for(0.05)).gradients <= 0.05


@pytest.mark.exhaustive
def test_small_gradients_in_float16_are_scaled() -> None:
    """A scale is found; the scale 1 is the positive control: gradients underflow."""

    def loss_fn(params: Any, batch: Any) -> Any:
        with jax.named_scope("layer"):
            return 1e-6 * jnp.sum((batch["x"] @ params) ** 2 / 32)

    w = weights(1)[0]
    found = sensitivity(loss_fn, w, BATCH, low="mixed_float16")
    plain = sensitivity(loss_fn, w, BATCH, low="mixed_float16", loss_scale=1.0)
    assert found.loss_scale == 2.0**16
    assert found.all_low.gradients < 0.01 < plain.all_low.gradients
    assert found.errors(found.low).gradients < 0.01


@pytest.mark.exhaustive
def test_float8() -> None:
    """Codes of float8 are switched too; the planted outlier wastes the range of its product."""

    def loss_fn(params: Any, batch: Any) -> Any:
        with jax.named_scope("outlier"):
            h = jnp.concatenate([batch["x"][:, :-1], 3e4 + 0 * batch["x"][:, -1:]], 1)
            h = jnp.tanh(h @ params[0].at[-1].multiply(1e-5))
        with jax.named_scope("plain"):
            h = h @ params[1]
        return squares(h, batch)

    report = sensitivity(loss_fn, weights(2), BATCH, low="mixed_float8", confirm=True)
    assert report.rows[0].path == "outlier"
    assert report.all_low.gradients == pytest.approx(report.measured.gradients, rel=0.5)
    assert report.rows[1].alone.gradients > 0.01  # a float8 rounding, not a bfloat16 one
    assert report.errors(report.rules_for(0.1)).gradients <= 0.1


@pytest.mark.usefixtures("blocks_on_a_cpu")
def test_products_of_blocks_are_refused() -> None:
    """Their codes cannot be switched: an error, and no number that is wrong."""

    def loss_fn(w: Any, x: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.mean((x @ w) ** 2)

    square = jnp.ones((32, 32))
    with pytest.raises(NotImplementedError, match="does not know products of blocks"):
        sensitivity(loss_fn, square, square, low="mixed_float8,products=mxfp8")


def test_candidates_are_parts_and_the_rest_stays_high() -> None:
    loss_fn, params = mlp(1)
    report = sensitivity(loss_fn, params, BATCH, candidates=["layer_[01]", "layer_2"])
    assert [row.path for row in report.rows] == ["layer_[01]", "layer_2"]
    rules = report.rules_for(0.1)
    assert rules.resolve("layer_2").compute_dtype == jnp.bfloat16
    assert rules.resolve("layer_3").compute_dtype == jnp.float32
    assert report.errors(report.rules_for(1e-9)).gradients == 0


@pytest.mark.exhaustive
def test_outputs_are_measured() -> None:
    loss_fn, params = mlp(None, layers=2)

    def with_outputs(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch), {"logits": batch["x"] @ params[0], "count": 3}

    report = sensitivity(with_outputs, params, BATCH, has_aux=True)
    assert 1e-4 < report.all_low.outputs < 0.01
    assert report.errors(report.rules_for(1e-9, of="outputs")).outputs <= 1e-9


def test_products_that_are_low_already_are_told() -> None:
    """They are in the reference too, so that the report cannot speak of them."""
    w = weights(1)[0]

    def loss_fn(w: Any, batch: Any) -> Any:
        with jax.named_scope("half"):
            return squares(batch["x"].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), batch)

    with pytest.warns(UserWarning, match="in half. They are in the reference too"):
        sensitivity(loss_fn, w, BATCH)


@pytest.mark.exhaustive
def test_sharded_on_explicit_axes() -> None:
    """The numbers are those of one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    loss_fn, params = mlp(1)
    with jax.set_mesh(mesh):
        batch = jax.device_put(BATCH, jax.P("data"))
        found = sensitivity(loss_fn, jax.device_put(params, jax.P()), batch)
    alone = sensitivity(loss_fn, params, BATCH)
    assert found.rows[0].path == alone.rows[0].path == "layer_1"
    assert found.all_low.gradients == pytest.approx(alone.all_low.gradients, rel=0.05)


@pytest.fixture(scope="module")
def small() -> SensitivityReport:
    return sensitivity(*mlp(None, layers=2), BATCH)


def test_the_report_is_plain(small: SensitivityReport) -> None:
    found = json.loads(json.dumps(small.as_dict(), allow_nan=False))
    assert [part["path"] for part in found["parts"]] == [row.path for row in small.rows]
    assert found["low"] == "mixed_bfloat16"
    assert found["operations"][0]["line"] == small.operations[0].line
    assert found["loss"]["deviation"] > 0
    assert found["parts"][0]["alone"]["outputs"] is None
    text = str(small)
    assert "layer_0" in text
    assert "mixed_bfloat16 moves the loss" in text
    assert "50%" in text


def test_wrong_arguments_are_told(small: SensitivityReport) -> None:
    loss_fn, params = mlp(None, layers=2)
    with pytest.raises(ValueError, match=r"'layer_x' matches no scope.*'layer_0', 'layer_1'"):
        sensitivity(loss_fn, params, BATCH, candidates=["layer_x"])
    with pytest.raises(TypeError, match="must be a list of patterns, got 'layer_0'"):
        sensitivity(loss_fn, params, BATCH, candidates="layer_0")
    with pytest.raises(ValueError, match="can match nothing"):
        sensitivity(loss_fn, params, BATCH, candidates=["type:Dense"])
    with pytest.raises(ValueError, match="nothing in this program has a name"):
        sensitivity(lambda w, b: squares(b["x"] @ w, b), params[0], BATCH)
    with pytest.raises(ValueError, match="not finite even where nothing"):
        sensitivity(loss_fn, [w / 0.0 for w in params], BATCH)
    with pytest.raises(TypeError, match="with_scopes takes an nnx module, got list"):
        jaxmp.nnx.with_scopes(params)
    with pytest.raises(ValueError, match="candidates has no pattern"):
        sensitivity(loss_fn, params, BATCH, candidates=[])
    for target in (0, "1%", math.inf, True):
        with pytest.raises(ValueError, match="target must be a positive"):
            small.rules_for(target)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are no outputs"):
        small.rules_for(0.1, of="outputs")
    with pytest.raises(ValueError, match="of must be"):
        small.rules_for(0.1, of="weights")  # type: ignore[arg-type]
