"""`jaxmp.recompute`: the same numbers, nothing dear twice, and what is kept is what must be."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, PartitionSpec as P

import jaxmp
from jaxmp._numerics.tree import cast_floating
from jaxmp._program.program import is_part_call
from tests.support.autocast_checks import W, X, compiled, error, rows, weights
from tests.support.dots import equations
from tests.support.recompute_checks import (
    MODES,
    check,
    dear_operations,
    gradient,
    kept_bytes,
    norm,
    scalar,
    shapes,
)

pytestmark = pytest.mark.jax

V = weights(16, 16, seed=2)
SQUARE = jax.device_put(np.dot(rows(4, 4), rows(4, 4).T) + 4 * np.eye(4, dtype=np.float32))
SYMMETRIC = jax.device_put(np.dot(W, W.T))
MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
SPLIT = jax.NamedSharding(MESH, P("data"))
IMAGES, FILTERS = rows(2, 8, 8, 4), weights(3, 3, 4, 4)


def mlp(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.gelu(x @ w) @ v


def attention(x: Any, w: Any, v: Any) -> Any:
    scores = (x @ w) @ (x @ v).T
    masked = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -1e30)
    return jax.nn.softmax(masked) @ x


def layers(x: Any, w: Any, v: Any) -> Any:
    for _ in range(3):
        x = x + mlp(norm(x), w, v)
    return x


def scanned(x: Any, w: Any, v: Any) -> Any:
    def layer(x: Any, ws: Any) -> Any:
        return x + mlp(norm(x), *ws), jnp.sum(x)

    return lax.scan(layer, x, (jnp.stack([w, v]), jnp.stack([v, w])))


def recurrent(x: Any, w: Any, v: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, o, g = jnp.split(x @ w + h @ v, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (jnp.tile(h, 4), c), h

    return lax.scan(step, (jnp.zeros(16), jnp.zeros(4)), x)


def nested(x: Any, w: Any, v: Any) -> Any:
    def outer(x: Any, _: Any) -> Any:
        x, ys = lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=2)
        return jnp.tanh(x @ v), ys

    return lax.scan(outer, x, None, length=2)[0]


def branches(x: Any, w: Any, v: Any) -> Any:
    y = lax.cond(jnp.sum(x) > 0, lambda: jax.nn.gelu(x @ w), lambda: x @ v)
    return lax.switch(1, [jnp.sin, lambda y: jnp.tanh(y @ w) @ v], y)


def dropout(x: Any, w: Any, v: Any) -> Any:
    mask = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jnp.where(mask, jnp.tanh(x @ w) / 0.5, 0) @ v


@jax.custom_vjp
def own(x: Any) -> Any:
    return jnp.sin(x)


own.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (2 * g * cos,))


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("mine"))
def checkpointed(x: Any, w: Any, v: Any) -> Any:
    return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "mine") @ v)


def batch_norm(x: Any, w: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    for _ in range(2):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        mean = y.mean((0, 1, 2), keepdims=True)
        variance = y.var((0, 1, 2), keepdims=True)
        x = x + jax.nn.relu((y - mean) * lax.rsqrt(variance + 1e-5))
    return x


def pooled(x: Any, w: Any) -> Any:
    x = jnp.tanh(batch_norm(x, w))
    return nn.max_pool(x, (2, 2), (2, 2)) + nn.pool(x, 0.0, lax.add, (2, 2), (2, 2), "VALID")


def in_place(x: Any, w: Any) -> Any:
    ref = jax.new_ref(jnp.zeros_like(x))
    for i in range(3):
        ref[...] = jnp.tanh(ref[...] + x @ w) * (i + 1)
    return ref[...]


# Sorts, gathers, scatters and others are in test_properties.py.
PROGRAMS: dict[str, tuple[Any, ...]] = {
    "mlp": (mlp, X, W, V),
    "attention": (attention, X, W, V),
    "layers": (layers, X, W, V),
    "scan": (scanned, X, W, V),
    "LSTM": (recurrent, X, W, V),
    "nested scans": (nested, X, W, V),
    "branches": (branches, X, W, V),
    "dropout": (dropout, X, W, V),
    "own gradient": (lambda x, w: own(jnp.tanh(x @ w)) @ w, X, W),
    "a user's checkpoint": (lambda *a: checkpointed(jnp.sin(checkpointed(*a)), *a[1:]), X, W, V),
    "convolutions": (batch_norm, IMAGES, FILTERS),
    "pools": (pooled, IMAGES, FILTERS),
    "references": (in_place, X, W),
    "top k": (lambda x, w: jnp.exp(lax.top_k(jnp.tanh(x @ w), 4)[0]), X, W),
    "cumulative product": (lambda x, w: jnp.exp(jnp.cumprod(jnp.tanh(x @ w), 1)), X, W),
    "cumulative maximum": (lambda x, w: jnp.exp(lax.cummax(jnp.tanh(x @ w))), X, W),
    "cumulative logsumexp": (lambda x, w: jnp.sin(lax.cumlogsumexp(jnp.tanh(x @ w))), X, W),
    "product": (lambda x, w: jnp.sin(jnp.prod(jnp.tanh(x @ w), 1)), X, W),
    "FFT": (lambda x, w: jnp.abs(jnp.fft.fft(jnp.tanh(x @ w)) + 2), X, W),
    "multiply": (
        lambda x, w: jnp.sin((x @ w).at[jnp.array([1, 2])].multiply(x[:2], unique_indices=True)),
        X,
        W,
    ),
    "Cholesky": (lambda a: jnp.sin(jnp.linalg.cholesky(a @ a.T)) @ a, SQUARE),
    "solve": (lambda a, x: jnp.sin(jnp.linalg.solve(jnp.sin(a) + a, jnp.sin(x))), SQUARE, X),
    "eigenvalues": (lambda a: jnp.sin(jnp.linalg.eigvalsh(a @ a.T)), SQUARE),
    "determinant": (lambda a: jnp.linalg.slogdet(a)[1], SQUARE),
    # Above 1.46, where the derivative of gammaln is zero, and its roundings all that there is.
    "special": (lambda x, w: jax.scipy.special.gammaln(jnp.exp(2 + jnp.tanh(x @ w))) @ w, X, W),
    "inverse erf": (lambda x, w: lax.erf_inv(jnp.tanh(x @ w) / 2) @ w, X, W),
    "map": (lambda x, w: lax.map(lambda r: jnp.tanh(r @ w) @ w, x), X, W),
    "associative": (lambda x, w: lax.associative_scan(jnp.multiply, jnp.tanh(x @ w)), X, W),
    "long": (lambda x, w: functools.reduce(lambda y, _: jnp.sin(y), range(80), x) @ w, X, W),
    "barrier": (lambda x, w: jnp.sin(lax.optimization_barrier(jnp.sin(x @ w))), X, W),
    "no product": (lambda x: jnp.exp(jnp.sin(x)) * jax.nn.softmax(x), X),
    "constants": (lambda x: (x, 1, True, jnp.float32(2), np.ones(3, np.float32)), X),
    "half precision": (lambda x: mlp(*(a.astype(jnp.bfloat16) for a in (x, W, V))), X),
}


@pytest.mark.parametrize("mode", ["auto", pytest.param("always", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_the_same_function(name: str, mode: str) -> None:
    """Defends the promise: values to the bit, gradients to roundings, and nothing dear twice."""
    fun, *args = PROGRAMS[name]
    within = 0.02 if name == "half precision" else 1e-5
    check(fun, *args, mode=mode, within=within)


def test_the_check_sees_what_is_computed_twice() -> None:
    """Whole checkpoints are what the check is there to find."""
    plain = dear_operations(mlp, X, W, V)
    twice = dear_operations(jax.checkpoint(lambda *a: jnp.sin(mlp(*a))), X, W, V)
    assert twice["dot_general"] > plain["dot_general"]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("mlp", ["float32[4,16]"]),
        ("attention", ["float32[16,4]", "float32[4,16]", "float32[4,4]"]),
        ("dropout", ["bool[4,16]", "float32[4,16]"]),
        ("convolutions", ["float32[2,8,8,4]"] * 3 + ["float32[4]"] * 6),
    ],
)
def test_what_is_kept(name: str, left: list[str]) -> None:
    """Results of products, a mask, and statistics: no more."""
    fun, *args = PROGRAMS[name]
    assert shapes(jaxmp.recompute(fun), *args) == sorted(left)
    assert kept_bytes(fun, *args) > kept_bytes(jaxmp.recompute(fun), *args)


def test_a_cast_is_kept_in_place_of_what_is_wide() -> None:
    """Defends 16 bits at rest: a product in float32 whose cast is all that is read."""

    def fun(x: Any, w: Any) -> Any:
        y = jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        return jnp.tanh(y.astype(jnp.float32)) * 2

    low = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    assert shapes(jaxmp.recompute(fun), *low) == ["bfloat16[4,16]"]


def test_products_that_are_added_are_kept_as_a_sum() -> None:
    lean = jaxmp.recompute(lambda x, w, v: jnp.tanh(x @ w + jnp.sin(x) @ v))
    assert shapes(lean, X, W, V) == ["float32[4,16]"]


def test_statistics_do_not_cut_the_region_of_a_norm() -> None:
    """The wide array in a norm of 16 bits is not kept, though two things read it."""

    def fun(x: Any, w: Any) -> Any:
        y = (x @ w).astype(jnp.float32)
        return norm(y).astype(jnp.bfloat16) @ w

    x, w = rows(4, 64).astype(jnp.bfloat16), weights(64, 64).astype(jnp.bfloat16)
    assert shapes(jaxmp.recompute(fun), x, w) == ["bfloat16[4,64]"] + ["float32[4]"] * 2


def test_capped_logits_are_kept_once() -> None:
    """The logits of the labels are a statistic: to pick them keeps no second copy of all."""

    def loss(w: Any, x: Any, labels: Any) -> Any:
        logits = 30 * jnp.tanh(x @ w / 30)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    args = weights(16, 64), rows(4, 16), np.arange(4)
    assert shapes(loss, *args).count("float32[4,64]") > 1  # positive control
    assert shapes(jaxmp.recompute(loss), *args).count("float32[4,64]") == 1


def test_a_pick_that_is_named_as_dear_is_kept() -> None:
    """What a user names is kept, and what it reads: also where it would be cheap."""

    def loss(w: Any, x: Any, labels: Any) -> Any:
        logits = jnp.tanh(x @ w)
        return jnp.sum(jnp.sin(jnp.take_along_axis(logits, labels[:, None], -1))) + jnp.sum(logits)

    args = weights(16, 64), rows(4, 16), np.arange(4)
    cheap, dear = jaxmp.recompute(loss), jaxmp.recompute(loss, save=["gather"])
    assert kept_bytes(cheap, *args) < kept_bytes(dear, *args)
    assert error(*(compiled(jax.grad(f))(*args) for f in (cheap, loss))) < 1e-6


def test_the_stream_of_layers_is_kept_once() -> None:
    """Two arrays a layer: the stream, and what its gelu is of."""
    lean = shapes(jaxmp.recompute(layers), X, W, V)
    assert lean.count("float32[4,16]") == 2 * 3 - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_under_transformations(mode: Any) -> None:
    """vmap, jvp, second derivatives, linearize, and a scan over steps with donated arguments."""
    lean = jaxmp.recompute(scanned, mode)
    batch = jnp.stack([X, 2 * X])
    for transformed in (
        lambda f: jax.vmap(f, (0, None, None))(batch, W, V),
        lambda f: jax.jvp(f, (X, W, V), (X, W, V)),
        lambda f: jax.linearize(f, X, W, V)[1](X, W, V),
        lambda f: jax.jvp(gradient(f), (X, W, V), (X, W, V)),
        lambda f: jax.vmap(gradient(f), (0, None, None))(batch, W, V),
        lambda f: gradient(lambda *a: gradient(f)(*a)[1])(X, W, V),
    ):
        want = compiled(lambda t=transformed: t(scanned))()
        assert error(compiled(lambda t=transformed: t(lean))(), want) <= 2e-5


def test_random_numbers_and_callbacks_run_once() -> None:
    calls: list[int] = []

    def seen(x: Any) -> Any:
        calls.append(1)
        return np.asarray(x)

    def fun(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        jax.debug.callback(lambda: calls.append(1))
        kept = lax.stop_gradient(jax.pure_callback(seen, jax.typeof(y), lax.stop_gradient(y)))
        noise = jax.random.normal(jax.random.key(0), y.shape)
        return jnp.sin(y * kept + noise) @ w

    jax.block_until_ready(compiled(gradient(jaxmp.recompute(fun, "always")))(X, W))
    jax.effects_barrier()
    assert len(calls) == 2
    check(lambda x, w: jnp.tanh(x @ w) * jax.random.normal(jax.random.key(0), (4, 16)), X, W)


def test_in_a_shard_map() -> None:
    @functools.partial(
        jax.shard_map, mesh=MESH, in_specs=(P("data"), P(), P()), out_specs=P("data")
    )
    def fun(x: Any, w: Any, v: Any) -> Any:
        mean = lax.pmean(jnp.tanh(x @ w), "data")
        return jnp.exp(jnp.sin(mean + x) @ v)

    check(fun, X, W, V)
    assert kept_bytes(fun, X, W, V) > kept_bytes(jaxmp.recompute(fun), X, W, V)


def test_in_a_jit_with_shardings() -> None:
    inner = jax.jit(mlp, in_shardings=(SPLIT, None, None), out_shardings=SPLIT)
    check(lambda *args: jnp.sin(inner(*args)), X, W, V)
    assert shapes(jaxmp.recompute(inner), X, W, V) == ["float32[4,16]"]


@pytest.mark.parametrize("mode", MODES)
def test_a_sharding_constraint_on_what_was_widened_is_kept(mode: str) -> None:
    """To go back to the narrow product would move the data again."""

    def fun(x: Any, w: Any) -> Any:
        y = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        y = lax.with_sharding_constraint(y, SPLIT)
        return jnp.tanh(y) @ w + jnp.sin(y) @ w

    check(fun, X, np.eye(16, dtype=np.float32), within=0.02, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [0, 1])
def test_what_products_one_after_the_other_read_is_computed_again_once(
    mode: Any, factor: int
) -> None:
    """Products that wait for each other are of several regions, and what they share is kept."""

    def fun(x: Any, w: Any) -> Any:
        v = jnp.tanh(jnp.tanh(w @ w))
        for i in range(8):
            x = jnp.sin(x @ (v * (1 + i * factor)))
        return x

    def tanhs(fun: Any) -> int:
        program = jax.make_jaxpr(gradient(fun))(X, SYMMETRIC)
        return [e.primitive.name for e in equations(program.jaxpr)].count("tanh")

    assert tanhs(fun) == 2
    assert tanhs(jaxmp.recompute(fun, mode)) == 4  # in the forward pass, and once again
    check(fun, X, SYMMETRIC, within=1e-5, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_jit_inside_gives_no_array_away(mode: Any) -> None:
    """Its argument is kept for the backward pass of what it calls."""
    inner = jax.jit(lambda y: jnp.tanh(y) * 2, donate_argnums=0)
    fun = scalar(lambda x, w, v: inner(jnp.sin(x @ w)) @ v)
    got = jax.grad(jaxmp.recompute(fun, mode), argnums=1)(X, W, V)
    assert error(got, compiled(jax.grad(fun, argnums=1))(X, W, V)) <= 2e-6


def test_names_of_scopes_and_lines_stay() -> None:
    """Defends reports: what runs in a piece is where it was, also in the second of equal layers."""

    def fun(x: Any, w: Any) -> Any:
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.sin(x)

    def scopes(fun: Any) -> list[str]:
        text = jax.jit(fun).lower(X, W).as_text(debug_info=True)
        return [name for name in ("layer_0/", "layer_1/", "layer_2/") if name in text]

    assert scopes(jaxmp.recompute(fun)) == scopes(fun) == ["layer_0/", "layer_1/"]
    places = {
        (row.line, row.path) for row in jaxmp.audit(jax.grad(scalar(fun)), X, W).product_lines
    }
    lean = jaxmp.audit(jax.grad(scalar(jaxmp.recompute(fun))), X, W)
    assert {(row.line, row.path) for row in lean.product_lines} == places


def pieces_of(program: Any) -> list[Any]:
    inner = (e for e in equations(program) if "jaxpr" in e.params and not is_part_call(e))
    return [e.params["jaxpr"] for e in inner]


def test_equal_layers_are_traced_once() -> None:
    """Defends the time to trace: twenty layers are two pieces, called twenty times."""

    def fun(x: Any, ws: Any) -> Any:
        for w in ws:
            x = x + jnp.tanh(norm(x) @ w) @ w
        return x

    program = jax.make_jaxpr(jaxmp.recompute(fun))(X, [W] * 20)
    pieces = pieces_of(program)
    assert len(pieces) >= 20
    assert len({id(piece) for piece in pieces}) <= 4
    sliced = jax.make_jaxpr(jaxmp.recompute(lambda x, w: fun(x, [w[i] for i in range(20)])))
    program = sliced(X, jnp.stack([W] * 20))
    pieces = pieces_of(program)
    assert len({id(piece) for piece in pieces}) <= 4


def test_loops_keep_no_copy_of_what_they_are_given() -> None:
    """The scanned weights and the masks are there already: none is stacked for the backward."""
    stacked = [each for each in shapes(jaxmp.recompute(scanned), X, W, V) if "[2," in each]
    # The stream before each layer and the product in it; statistics of rows; and the stacks of
    # weights that this function itself makes.
    rows = [each for each in stacked if each == "float32[2,4]"]
    assert sorted(set(stacked) - set(rows)) == ["float32[2,16,16]", "float32[2,4,16]"]
    assert stacked.count("float32[2,4,16]") == stacked.count("float32[2,16,16]") == 2
    assert len(rows) <= 3


def test_a_name_that_means_nothing_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match="'than' is in save, but is neither a primitive nor a function with"
    ):
        jaxmp.recompute(mlp, save=["than", "tanh"])(X, W, V)


def test_a_policy_around_it_holds() -> None:
    """Defends the user's own checkpoint: outside of it, what it names is kept, and no more."""

    def fun(x: Any, w: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "mine") @ w)

    policy = jax.checkpoint_policies.save_only_these_names("mine")
    around = jax.checkpoint(jaxmp.recompute(fun), policy=policy)
    assert shapes(around, X, W) == shapes(jax.checkpoint(fun, policy=policy), X, W)
    assert error(compiled(gradient(around))(X, W), compiled(gradient(fun))(X, W)) <= 1e-5


@jax.custom_jvp
def looked_at(x: Any) -> Any:
    return jnp.sin(x)


@looked_at.defjvp
def _(primals: Any, tangents: Any) -> Any:
    jax.debug.callback(lambda: CALLS.append(1))
    # By a product, though the function itself is cheap.
    return jnp.diag(jnp.ones(16)[:4]) @ jnp.sin(primals[0]), tangents[0] * jnp.cos(primals[0])


CALLS: list[int] = []


def test_rules_of_custom_jvp_run_once() -> None:
    """The function is cheap, its rule is not."""

    def fun(x: Any, w: Any) -> Any:
        return jnp.tanh(looked_at(jnp.tanh(x @ w))) @ w

    CALLS.clear()
    jax.block_until_ready(compiled(gradient(jaxmp.recompute(fun, "always")))(X, W))
    jax.effects_barrier()
    assert len(CALLS) == 1
    plain, now = dear_operations(fun, X, W), dear_operations(jaxmp.recompute(fun), X, W)
    assert now["dot_general"] == plain["dot_general"]


def test_a_rule_that_refuses_is_left_alone() -> None:
    @jax.custom_jvp
    def refusing(x: Any) -> Any:
        return jnp.sin(x)

    @refusing.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError("no derivative")

    def fun(x: Any, w: Any) -> Any:
        return lax.stop_gradient(refusing(lax.stop_gradient(x))) @ w

    np.testing.assert_array_equal(compiled(jaxmp.recompute(fun))(X, W), compiled(fun)(X, W))


def test_the_context_of_what_looks_alike_stays() -> None:
    """Defends offloading and metadata: pieces that differ in nothing but their context are two."""

    def fun(x: Any, w: Any) -> Any:
        for tag in "abc":
            with set_xla_metadata(tag=tag):
                x = jnp.sin(jnp.tanh(x @ w) @ w)
        return x

    def tags(fun: Any) -> list[str]:
        found = equations(jax.make_jaxpr(fun)(X, W))
        return [str(e.ctx.xla_metadata) for e in found if e.primitive.name == "tanh"]

    assert len(set(tags(fun))) == 3
    assert tags(jaxmp.recompute(fun)) == tags(fun)


def test_a_mask_is_kept_in_place_of_the_product_that_it_is_of() -> None:
    def fun(x: Any, w: Any) -> Any:
        return jnp.where(x @ w > 0, jnp.sin(x), -x)

    assert shapes(jaxmp.recompute(fun), X, W) == ["bool[4,16]"]


def test_a_loss_may_change_its_arguments() -> None:
    """They are copies under jit, with recompute as without."""

    def loss(params: Any, batch: Any) -> Any:
        y = batch.pop("y")
        batch["h"] = batch["x"] @ params["w"]
        return jnp.mean(jnp.square(batch["h"] - y))

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32")
    state = jaxmp.TrainState.create(params={"w": W}, tx=tx)
    step = jaxmp.make_train_step(loss, donate=False, recompute="auto")
    assert step(state, {"x": X, "y": X})[1]["loss"] > 0


@jax.tree_util.register_pytree_node_class
class MadeAnew:
    """A tree whose leaves are other objects at each look."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def tree_flatten(self) -> Any:
        return (self.w * 1.0, 2.0 * float("1.5")), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> "MadeAnew":
        return cls(leaves[0])


def test_a_tree_may_make_its_leaves_anew() -> None:
    def fun(x: Any, tree: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ tree.w))

    assert error(jaxmp.recompute(fun)(X, MadeAnew(W)), fun(X, MadeAnew(W))) <= 2e-6


def test_names_that_can_be_dear() -> None:
    @jax.custom_jvp
    def mish(x: Any) -> Any:
        return x * jnp.tanh(jax.nn.softplus(x))

    mish.defjvp(lambda p, t: jax.jvp(lambda x: x * jnp.tanh(jax.nn.softplus(x)), p, t))

    def fun(x: Any, w: Any) -> Any:
        return jax.checkpoint(jnp.sin)(jax.nn.relu(mish(jax.nn.silu(x @ w)))) @ w

    least = kept_bytes(jaxmp.recompute(fun), X, W)
    for name in ("silu", "jax.nn.silu", "mish", "relu", "tanh"):
        assert kept_bytes(jaxmp.recompute(fun, save=[name]), X, W) > least, name
    assert kept_bytes(jaxmp.recompute(fun, save=["sin"]), X, W) == least  # in a user's checkpoint


def test_never_is_the_function_itself() -> None:
    assert jaxmp.recompute(mlp, "never") is mlp


def test_outside_of_jit_it_is_compiled_once() -> None:
    traces = []

    def fun(x: Any, flag: str) -> Any:
        traces.append(flag)
        return jnp.tanh(x)

    lean = jaxmp.recompute(fun)
    for _ in range(3):
        lean(X, "a")
    assert traces == ["a"]


def test_over_autocast() -> None:
    """Defends the order in which both are used: dtypes first, then memory."""
    low = jaxmp.autocast(layers, "mixed_bfloat16")
    check(low, X, W, V, within=0.02)
    assert kept_bytes(jaxmp.recompute(low), X, W, V) < 0.6 * kept_bytes(low, X, W, V)


def test_in_float16_forward_is_the_same_to_the_bit() -> None:
    """Explicit casts and exact parts run as they were written."""
    fun = jaxmp.autocast(lambda x, w: jaxmp.full_precision(mlp)(x @ w, w, w), "mixed_float16")
    lean = jaxmp.recompute(fun)
    np.testing.assert_array_equal(compiled(lean)(X, W), compiled(fun)(X, W))


@pytest.mark.parametrize(
    ("make", "error_type", "text"),
    [
        (lambda: jaxmp.recompute(1), TypeError, "fun must be a function, got int"),
        (
            lambda: jaxmp.recompute(mlp, "sometimes"),
            ValueError,
            "recompute must be 'auto', 'always', 'loops' or 'never', got 'sometimes'",
        ),
        (lambda: jaxmp.recompute(mlp, save="tanh"), TypeError, r"Write save=\['tanh'\]"),
        (lambda: jaxmp.recompute(mlp, save=[jnp.tanh]), TypeError, "save must list names"),
        (lambda: jaxmp.recompute(mlp, save=None), TypeError, "names such as 'tanh', got NoneType"),
    ],
)
def test_errors(make: Any, error_type: type[Exception], text: str) -> None:
    with pytest.raises(error_type, match=text):
        make()


def plain_mlp(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["w"])
    return jnp.sum(hidden @ params["v"])


def test_the_audit_says_what_is_kept_and_what_is_computed_again() -> None:
    params = {"w": W, "v": V}
    report = jaxmp.audit(jaxmp.recompute(plain_mlp), params, X)
    assert report.kept["float32"] == X.size * 4
    assert jaxmp.audit(plain_mlp, params, X).kept["float32"] > 2 * X.size * 4
    (row,) = report.recomputed
    assert "plain_mlp" in row.line
    # A gelu is a dozen operations on each number, and a product would be 16 times 2.
    assert 8 * X.size <= row.operations <= 20 * X.size
    text = str(report)
    assert "Computed again for the backward pass" in text
    assert jaxmp.audit(plain_mlp, params, X).recomputed == ()
    step = jaxmp.audit(jax.value_and_grad(jaxmp.recompute(plain_mlp)), params, X)
    assert [(each.line, each.operations) for each in step.recomputed] == [
        (row.line, row.operations)
    ]


def test_a_check_of_what_is_kept() -> None:
    params = {"w": W, "v": V}
    report = jaxmp.audit(jaxmp.recompute(plain_mlp), params, X)
    assert report.check(kept={"float32": X.size * 4}) is report
    with pytest.raises(jaxmp.AuditError, match=r"kept: 256 bytes of float32 .* allowed are 255"):
        report.check(kept={"float32": X.size * 4 - 1})
    with pytest.raises(jaxmp.AuditError, match=r"of float32 .* allowed are 0:\n.*plain_mlp"):
        report.check(kept={"bfloat16": 2**20})
    with pytest.raises(ValueError, match="kept is a number of bytes for each dtype"):
        report.check(kept=2**20)
    with pytest.raises(ValueError, match=r"kept\['float32'\] is the largest number allowed"):
        report.check(kept={jnp.float32: -1})
    with pytest.raises(ValueError, match="the audit has no residuals"):
        jaxmp.audit(mlp, X, W, V).check(kept={})


def loss_of_layers(params: Any, x: Any) -> Any:
    return jnp.sum(scanned(x, params["w"], params["v"])[0])


PARAMS = {"w": W, "v": V}
STEPS: dict[str, Any] = {
    "value_and_grad": lambda **options: jaxmp.value_and_grad(loss_of_layers, **options),
    "grad": lambda **options: jaxmp.grad(loss_of_layers, **options),
    "reduced": lambda **options: jaxmp.value_and_grad(
        loss_of_layers, reduce_dtype="float32", microbatches=2, loss_scale=8.0, **options
    ),
    "autocast": lambda **options: jax.value_and_grad(
        jaxmp.autocast(loss_of_layers, "mixed_bfloat16", **options)
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_as_an_option(name: str) -> None:
    """Defends that each of them hands it on: the same gradient, and checkpoints in its program."""
    plain, lean = STEPS[name](), STEPS[name](recompute="auto")
    within = 0.02 if name == "autocast" else 1e-5
    assert error(compiled(lean)(PARAMS, X), compiled(plain)(PARAMS, X)) <= within
    again = jaxmp.audit(lean, PARAMS, X).recomputed
    assert again
    assert not jaxmp.audit(plain, PARAMS, X).recomputed
    with pytest.raises(
        ValueError, match="recompute must be 'auto', 'always', 'loops' or 'never', got 'all'"
    ):
        STEPS[name](recompute="all")


@pytest.mark.slow
def test_in_a_train_step_of_a_live_module() -> None:
    """Statistics and random counters change as they do without it."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
            self.head = nnx.Linear(16, 1, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.head(self.dropout(nnx.gelu(self.norm(self.linear(x))))).sum()

    def train(**options: Any) -> Any:
        model = Model()
        evaluate = jaxmp.nnx.value_and_grad(lambda model, x: model(x), **options)
        results = [evaluate(model, X) for _ in range(2)]
        return results, nnx.as_pure(nnx.state(model))

    assert error(train(recompute="always"), train()) <= 1e-5
    assert error(train(recompute="auto", reduce_dtype="float32"), train()) <= 1e-5
    with pytest.raises(ValueError, match="recompute must be"):
        train(recompute="often")
    lean = jaxmp.nnx.autocast(Model(), "mixed_bfloat16", recompute="auto")
    low = jaxmp.nnx.autocast(Model(), "mixed_bfloat16")
    assert error(lean(X), low(X)) <= 0.02
    plain = jaxmp.nnx.value_and_grad(lambda model: model(X), recompute="auto")
    assert jaxmp.audit(lambda model: plain(model)[0], Model()).recomputed


@pytest.mark.parametrize("author", ["cast", "autocast"])
@pytest.mark.slow
def test_sums_and_gathers_over_devices_are_the_same(author: str) -> None:
    """FSDP in a scan: nothing is gathered a third time, nothing is summed in other dtypes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": weights(2, 16, 64), "v": weights(2, 64, 16)}
    split = jaxmp.sharding.fully_sharded(params, mesh, "data", min_size=16)
    fsdp = jaxmp.sharding.FSDP(shardings=split, axis="data")

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, each: Any) -> Any:
            return x + (jax.nn.gelu(norm(x) @ each["w"]) @ each["v"]), None

        if author == "cast":
            params, x = cast_floating((params, x), jnp.bfloat16)
        return jnp.mean(lax.scan(layer, x, params)[0].astype(jnp.float32))

    def found(recompute: Any) -> Any:
        fun = loss if author == "cast" else jaxmp.autocast(loss, "mixed_bfloat16")
        gradient = jaxmp.value_and_grad(fun, reduce_dtype="float32", fsdp=fsdp, recompute=recompute)
        placed = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, split
        )
        rows = jax.ShapeDtypeStruct(
            (16, 8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, P("data"))
        )
        lowered = jax.jit(gradient).lower(placed, rows)
        totals: collections.Counter[Any] = collections.Counter()
        for row in jaxmp.sharding.collectives(lowered).rows:
            totals[row.kind, row.dtype] += row.bytes * row.runs
        return totals, lowered.compile().memory_analysis().temp_size_in_bytes

    plain, lean = found("never"), found("auto")
    assert plain[0] == lean[0]
    assert plain[0]["all-gather", "bfloat16"]
    assert lean[1] < 0.8 * plain[1]


def test_options_by_their_old_names() -> None:
    recompute: Any = jaxmp.recompute
    for old, new, value in (("dear", "save", ["tanh"]), ("kept", "codes", "int8")):
        with pytest.warns(DeprecationWarning, match=f"{old}= is {new}= now: the next version"):
            lean = recompute(loss_of_rows, **{old: value})
        assert kept_bytes(lean, LARGE) == kept_bytes(recompute(loss_of_rows, **{new: value}), LARGE)
        with pytest.raises(TypeError, match=f"{old}= is the old name of {new}=: give {new}= alone"):
            recompute(loss_of_rows, **{old: value, new: value})


LARGE = np.ones((64, 64), np.float32)


def loss_of_rows(x: Any) -> Any:
    return jnp.sum(jnp.sin(jnp.tanh(x @ x)) @ x)
