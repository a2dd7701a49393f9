"""Meshes as JAX makes them, with explicit axes: the same numbers and sums as on automatic ones."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP, fully_sharded, per_shard, state_shardings
from tests.support import sharding_words as words
from tests.support.reduction_checks import (
    HALVES,
    gathers,
    narrow_sums,
    relative_error,
)
from tests.support.reduction_matrix import traffic

pytestmark = pytest.mark.usefixtures("standard_promotion")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESH = words.MESH
# What a CPU fuses it may leave unrounded, and fuses other things on other meshes.
EXACT = {"xla_allow_excess_precision": False}
MODES = ("dp", "fsdp", "tp", "fsdp+tp")
VOCAB, WIDTH, HIDDEN = 64, 32, 128


def exactly(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(fun, compiler_options=EXACT)


def random_params() -> Any:
    random = np.random.default_rng(0)
    shapes = {"table": (VOCAB, WIDTH), "up": (WIDTH, HIDDEN), "bias": (HIDDEN,)}
    shapes |= {"down": (HIDDEN, WIDTH), "layers": (3, WIDTH, WIDTH)}
    return {
        name: (random.normal(size=shape) * 0.1).astype("float32") for name, shape in shapes.items()
    }


def random_batch() -> Any:
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, size=(16, 6))
    return tokens, random.normal(size=(16, 6, WIDTH)).astype("float32")


def outputs(params: Any, tokens: Any, dtype: Any = jnp.float32) -> Any:
    """Plain JAX says no word of shardings, and refuses it on explicit axes: at the lookup."""
    params = jax.tree.map(lambda w: w.astype(dtype), params)

    def layer(h: Any, w: Any) -> Any:
        return h + jax.nn.relu(h @ w), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), params["table"][tokens], params["layers"])
    return jax.nn.gelu(h @ params["up"] + params["bias"]) @ params["down"]


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((outputs(params, batch[0]).astype(jnp.float32) - batch[1]) ** 2)


def cast_loss(params: Any, batch: Any) -> Any:
    made = outputs(params, batch[0], jnp.bfloat16)
    return jnp.mean((made.astype(jnp.float32) - batch[1]) ** 2)


def place(mode: str, *types: AxisType) -> tuple[Any, Any, FSDP | None]:
    """Params and batch on a mesh, and how params are gathered."""
    specs = dict.fromkeys(random_params(), P())
    mesh = jax.make_mesh((8,), ("data",), axis_types=types[:1])
    if "tp" in mode:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
        specs |= {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    fsdp = None
    if "fsdp" in mode:
        shardings = fully_sharded(random_params(), mesh, base=specs, min_size=1024)
        fsdp = FSDP(shardings=shardings)
    params = jax.device_put(random_params(), shardings)
    return params, jax.device_put(random_batch(), NamedSharding(mesh, P("data"))), fsdp


def check_equal(tree: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.jax
@pytest.mark.parametrize("loss", [cast_loss, jaxmp.autocast(loss_fn, "mixed_bfloat16")])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_automatic_axes(mode: str, loss: Any) -> None:
    """To the bit, in the shardings of their params, for a loss that plain JAX refuses here."""
    found = []
    for kind in (AUTO, EXPLICIT):
        params, batch, fsdp = place(mode, kind, kind)
        gradient = jaxmp.value_and_grad(loss, reduce_dtype="float32", fsdp=fsdp)
        found.append(exactly(gradient)(params, batch))
        if kind is EXPLICIT:
            with pytest.raises(Exception, match=r"Use `\.at"):
                jax.jit(jax.value_and_grad(loss_fn))(params, batch)
            for name, grad in found[-1][1].items():
                assert jax.typeof(grad).sharding == jax.typeof(params[name]).sharding
    check_equal(*found)


@pytest.mark.jax
@pytest.mark.parametrize("types", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
@pytest.mark.parametrize("mode", ["tp", "fsdp+tp"])
def test_meshes_of_both_kinds_of_axes(mode: str, types: Any) -> None:
    found = []
    for kinds in ((AUTO, AUTO), types):
        params, batch, fsdp = place(mode, *kinds)
        gradient = jaxmp.value_and_grad(cast_loss, reduce_dtype="float32", fsdp=fsdp)
        found.append(exactly(gradient)(params, batch))
    check_equal(*found)
    if fsdp is not None:  # its gradients are constrained along the automatic axis too
        assert found[1][1]["up"].sharding.is_equivalent_to(params["up"].sharding, 2)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_steps_are_those_of_automatic_axes(mode: str, policy: str) -> None:
    """Also under float32, which must run what the others run. Later steps are not traced anew."""
    traces, found = 0, []

    def counted(params: Any, batch: Any) -> Any:
        nonlocal traces
        traces += 1
        return loss_fn(params, batch)

    for kind in (AUTO, EXPLICIT):
        params, batch, fsdp = place(mode, kind, kind)
        dtype = "bfloat16" if policy == "bfloat16" else "float32"
        params = jax.tree.map(lambda w, dtype=dtype: w.astype(dtype), params)
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        tx = jaxmp.mixed_precision(inner, policy)
        state = jaxmp.TrainState.create(params=params, tx=tx)
        step = jaxmp.make_train_step(
            counted, policy, fsdp=fsdp, microbatches=2, shardings=state_shardings(state, params)
        )
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            first = traces if len(losses) == 1 else first  # noqa: F821
        assert traces == first
        found.append(losses)
        for name, param in state.params.items():
            assert param.sharding.is_equivalent_to(params[name].sharding, param.ndim)
        moment = state.opt_state.inner[1][0].mu["up"]
        assert jax.typeof(moment).sharding == jax.typeof(params["up"]).sharding
    # Steps are compiled as users compile them: a CPU may keep more bits of one than of the other.
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert found[1][2] < found[1][0]


def params_of_words(fsdp: bool) -> tuple[Any, Any, FSDP | None]:
    random = np.random.default_rng(2)
    shapes = [(words.WIDTH, words.WIDTH)] * 2 + [(words.WIDTH,)]
    params = [(random.normal(size=shape) * 0.2).astype("float32") for shape in shapes]
    shardings = jax.tree.map(lambda _: NamedSharding(MESH, P()), params)
    if fsdp:
        shardings = fully_sharded(params, MESH, min_size=64)
    x = random.normal(size=(words.EXAMPLES, words.WIDTH)).astype("float32")
    batch = jax.device_put(x, NamedSharding(MESH, P("data")))
    placed = jax.device_put(params, shardings)
    return placed, batch, FSDP(shardings=shardings) if fsdp else None


@pytest.mark.jax
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", words.BODIES)
def test_shardings_that_a_loss_asks_for(name: str, split: bool) -> None:
    """Losses to the bit, float32 sums, 16-bit gathers. Plain JAX sums 16 bits, and gathers 32."""
    params, x, fsdp = params_of_words(split)
    loss = words.loss_of(name)
    plain = jax.value_and_grad(loss)
    ours = jaxmp.value_and_grad(loss, reduce_dtype="float32", fsdp=fsdp)
    with jax.set_mesh(MESH):
        before, after = (jaxmp.sharding.collectives(each, params, x) for each in (plain, ours))
        (value, grads), (ours_value, ours_grads) = (exactly(f)(params, x) for f in (plain, ours))
    assert narrow_sums(before) > 0
    assert narrow_sums(after) == 0, after
    assert value == ours_value
    assert 0 < relative_error(ours_grads, grads) < 0.02
    for grad, param in zip(ours_grads, params, strict=True):
        assert jax.typeof(grad).sharding == jax.typeof(param).sharding
    if split:
        assert gathers(before, "float32") > 0 == gathers(after, "float32"), after
        assert 0 < gathers(after, HALVES) <= gathers(before, "float32") / 2


@pytest.mark.parametrize("mode", ["dp", "fsdp"])
def test_per_shard(mode: str) -> None:
    """A loss scale and params that lie on explicit axes, and a loss that plain JAX refuses."""
    found = []
    for kind in (AUTO, EXPLICIT):
        params, batch, _ = place(mode, kind)
        mesh = params["up"].sharding.mesh
        specs = jax.tree.map(lambda x: x.sharding.spec, params)
        scale = jaxmp.DynamicLossScale(init_scale=8.0).init()
        scale = jax.device_put(scale, NamedSharding(mesh, P()))

        def gradient(
            params: Any, batch: Any, scale: Any, mesh: Any = mesh, specs: Any = specs
        ) -> Any:
            options = {"microbatches": 2, "comm_dtype": "bfloat16", "loss_scale": scale}
            return per_shard(cast_loss, mesh=mesh, specs=specs, **options)(params, batch)

        found.append(exactly(gradient)(params, batch, scale))
    check_equal(*found)
    for name, grad in found[1][1].items():
        assert jax.typeof(grad).sharding == jax.typeof(params[name]).sharding


@pytest.mark.parametrize("name", words.BODIES)
def test_autocast_within_a_reduction(name: str) -> None:
    """The constraints of the one are a part of the program that the other rewrites."""
    params, x, _ = params_of_words(fsdp=False)
    fast = jaxmp.autocast(words.loss_of(name), "mixed_bfloat16")
    gradient = jaxmp.value_and_grad(fast, reduce_dtype="float32")
    with jax.set_mesh(MESH):
        report = jaxmp.sharding.collectives(gradient, params, x)
        value, _ = jax.jit(gradient)(params, x)
        wanted = jax.jit(words.loss_of(name))(params, x)
    assert narrow_sums(report) == 0
    np.testing.assert_allclose(value, wanted, rtol=0.02)


def labels_loss(params: Any, batch: Any) -> Any:
    x, labels = batch
    kept = jnp.where(x > -1.0, x, 0.0)  # JAX lays out the number as x is
    logits = kept @ params[0]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.jax
def test_operations_for_which_jax_says_shardings_itself() -> None:
    params, x, _ = params_of_words(fsdp=False)
    labels = jax.device_put(np.arange(words.EXAMPLES) % words.WIDTH, x.sharding)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jaxmp.make_train_step(labels_loss, "mixed_bfloat16", donate=False)
    _, metrics = step(state, (x, labels))
    wanted = jax.jit(labels_loss)(*jax.device_get((params, (x, labels))))
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=0.01)


@pytest.mark.jax
def test_a_constraint_on_the_automatic_axis() -> None:
    """It says nothing of the explicit axis, along which its operand stays split."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(EXPLICIT, AUTO))
    w = jax.device_put(np.ones((32, 32), "f"), NamedSharding(mesh, P(None, "model")))
    x = jax.device_put(np.ones((16, 32), "f"), NamedSharding(mesh, P("data")))

    def loss(w: Any, x: Any) -> Any:
        h = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, "model"))
        return jnp.mean(h**2)

    with jax.set_mesh(mesh):
        plain, ours = (
            jaxmp.sharding.collectives(fun, w, x)
            for fun in (jax.grad(loss), jaxmp.grad(loss, reduce_dtype="float32"))
        )
    assert traffic(ours) == traffic(plain)


@pytest.mark.jax
def test_autocast_around_a_part_of_the_loss() -> None:
    """The part that JAX refuses is traced with the whole loss, whose result is a number."""
    fast = jaxmp.autocast(outputs, "mixed_bfloat16")

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((fast(params, batch[0]) - batch[1]) ** 2)

    shardings = place("fsdp", AUTO)[2].shardings, place("fsdp", EXPLICIT)[2].shardings
    reports = []
    for kind, each in zip((AUTO, EXPLICIT), shardings, strict=True):
        gradient = jaxmp.value_and_grad(loss, fsdp=FSDP(shardings=each))
        reports.append(traffic(jaxmp.sharding.collectives(gradient, *place("fsdp", kind)[:2])))
    assert reports[0] == reports[1]


@pytest.mark.jax
def test_in_a_shard_map_over_some_axes() -> None:
    found = []
    for kind in (AUTO, EXPLICIT):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        w = jax.device_put(np.ones((32, 32), "f"), NamedSharding(mesh, P(None, "model")))
        x = jax.device_put(np.ones((16, 32), "f") / 32, NamedSharding(mesh, P("data")))

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            axis_names={"data"},
            in_specs=(P(), P("data")),
            out_specs=(P(), P()),
        )
        def step(w: Any, x: Any) -> Any:
            fast = jaxmp.autocast(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_bfloat16")
            value, grads = jaxmp.value_and_grad(fast, reduce_dtype="float32")(w, x)
            return jax.lax.pmean(value, "data"), grads

        found.append(exactly(step)(w, x))
    check_equal(*found)


def solved(w: Any, x: Any) -> Any:
    matrix = w @ w.T + jnp.eye(words.WIDTH)

    def solve(_: Any, b: Any) -> Any:
        return jnp.linalg.solve(matrix, b)

    made = jax.lax.custom_linear_solve(lambda b: matrix @ b, x.mean(0), solve, solve)
    return jnp.sum(made**2)


@pytest.mark.jax
def test_programs_that_are_not_rewritten() -> None:
    """A solver holds programs of its own types: the loss is traced on automatic axes instead."""
    params, x, _ = params_of_words(fsdp=False)
    gradient = jaxmp.value_and_grad(solved, reduce_dtype="float32")
    wanted = jax.jit(jax.value_and_grad(solved))(*jax.device_get((params[0], x)))
    for made, other in zip(jax.jit(gradient)(params[0], x), wanted, strict=True):
        assert relative_error(made, other) < 1e-5


@pytest.mark.jax
def test_unreduced_sums() -> None:
    """A sum that is left to be made is made."""
    params, x, _ = params_of_words(fsdp=False)

    def loss(w: Any, x: Any) -> Any:
        parts = jnp.einsum("bi,bj->ij", x, x @ w, out_sharding=P(unreduced={"data"}))
        return jnp.mean(jax.reshard(parts, P(None, None)) ** 2)

    with jax.set_mesh(MESH):
        wanted = jax.jit(loss)(params[0], x)
        value, _ = jax.jit(jaxmp.value_and_grad(loss, reduce_dtype="float32"))(params[0], x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("cast", ["products", "params"])
def test_a_loss_runs_whatever_its_sums_are(reduce: str, cast: Any) -> None:
    policy = f"params=float32,compute=bfloat16,output=float32,reduce={reduce}"
    params, batch, _ = place("dp", EXPLICIT)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    state = jaxmp.TrainState.create(params=params, tx=tx)
    loss = cast_loss if cast == "params" else loss_fn
    step = jaxmp.make_train_step(loss, policy, cast=cast)
    assert np.isfinite(step(state, batch)[1]["loss"])


def test_optimizers_that_plain_jax_refuses() -> None:
    """Muon multiplies moments, which are split on both sides."""
    found = []
    for kind in (AUTO, EXPLICIT):
        params, batch, fsdp = place("fsdp", kind)
        tx = jaxmp.mixed_precision(optax.contrib.muon(1e-2), "mixed_bfloat16")
        state = jaxmp.TrainState.create(params=params, tx=tx)
        step = jaxmp.make_train_step(loss_fn, "mixed_bfloat16", fsdp=fsdp)
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_microbatches_that_would_move_the_batch() -> None:
    params, batch, _ = place("dp", EXPLICIT)
    gradient = jaxmp.value_and_grad(loss_fn, microbatches=4, reduce_dtype="float32")
    says = "each device has 2 examples, which 4 microbatches do not divide.*fewer microbatches"
    with pytest.raises(ValueError, match=says):
        gradient(params, batch)


@pytest.mark.jax
def test_derivatives_of_what_runs_on_automatic_axes() -> None:
    """Forward, second and mapped derivatives, compiled or not, and types that say how they lie."""
    params, x, _ = params_of_words(fsdp=False)
    w = params[0]

    def plain(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    fast = jaxmp.autocast(plain, "mixed_bfloat16")

    def all_of(fun: Any, w: Any, x: Any) -> Any:
        along = jax.jvp(jax.grad(fun), (w, x), (w, x))[1]
        each = jax.vmap(jax.grad(fun), in_axes=(None, 0))(w, x[:, None])
        return jax.grad(fun)(w, x), along, each

    wanted = jax.jit(functools.partial(all_of, plain))(w, x)
    made = jax.jit(functools.partial(all_of, fast))(w, x)
    for ours, theirs in zip(made, wanted, strict=True):
        assert relative_error(ours, theirs) < 0.03
        assert jax.typeof(ours).sharding == jax.typeof(theirs).sharding
    value, grad = jaxmp.value_and_grad(plain, reduce_dtype="float32")(w, x)  # without jit
    assert relative_error(grad, wanted[0]) < 1e-6
    assert value == plain(w, x)


def test_results_of_autocast_lie_as_their_types_say() -> None:
    params, x, _ = params_of_words(fsdp=False)
    fast = jaxmp.autocast(lambda w, x: jax.nn.softmax(x @ w), "mixed_bfloat16")
    for call in (fast, jax.jit(fast)):
        assert jax.typeof(call(params[0], x)).sharding.spec == P("data", None)


@pytest.mark.jax
def test_results_whose_sharding_jax_does_not_know() -> None:
    """They come back whole: small ones without a word, large ones with a warning."""
    params, batch, fsdp = place("fsdp", EXPLICIT)

    def loss_and_aux(params: Any, batch: Any, repeats: int) -> Any:
        made = outputs(params, batch[0])
        errors = (made - batch[1]) ** 2
        return jnp.mean(errors), jnp.tile(errors.sum(-1), (repeats, 1))

    def aux(repeats: int) -> Any:
        gradient = jaxmp.value_and_grad(
            lambda p, b: loss_and_aux(p, b, repeats), has_aux=True, fsdp=fsdp
        )
        return jax.jit(gradient)(params, batch)[0][1]

    assert jax.typeof(aux(1)).sharding.spec == P(None, None)
    with pytest.warns(UserWarning, match=r"come back whole .*float32\[16384,6\].*Use `.at.*out_sh"):
        aux(1024)


def test_arrays_that_a_loss_closes_over() -> None:
    """They work where JAX can trace the loss. Elsewhere the error says what to do."""
    params, x, _ = params_of_words(fsdp=False)
    gradient = jaxmp.value_and_grad(lambda w: jnp.mean((x @ w) ** 2), reduce_dtype="float32")
    assert jnp.isfinite(jax.jit(gradient)(params[0])[0])
    params, batch, fsdp = place("fsdp", EXPLICIT)
    closed = jaxmp.value_and_grad(lambda p: loss_fn(p, batch), fsdp=fsdp)
    with pytest.raises(Exception, match=r"Use `\.at") as error:
        jax.jit(closed)(params)
    assert "closes over stay on explicit axes: make them arguments" in error.value.__notes__[0]


def test_an_error_of_the_loss_is_its_own() -> None:
    params, x, _ = params_of_words(fsdp=False)
    gradient = jaxmp.value_and_grad(lambda w, x: jnp.mean(x @ w[:3]), reduce_dtype="float32")
    with pytest.raises(TypeError, match="contracting"):
        gradient(params[0], x)
    with pytest.raises(KeyError, match="other") as error:
        jaxmp.grad(lambda w, x: jnp.sum(w["other"]), reduce_dtype="float32")({"w": params[0]}, x)
    assert not any("automatic mesh axes" in note for note in getattr(error.value, "__notes__", ()))


class Net(nnx.Module):
    """A lookup, which plain JAX refuses here; statistics, and numbers that are drawn."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.down(self.drop(nnx.relu(self.norm(self.up(self.table(tokens))))))


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_nnx_modules(split: bool) -> None:
    """Losses, statistics and params as on automatic axes; params stay split."""

    def train(kind: AxisType) -> Any:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        whole = NamedSharding(mesh, P())
        model = Net(nnx.Rngs(0))
        weights, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
        shardings = jax.tree.map(lambda _: whole, weights)
        if split:
            shardings = fully_sharded(weights, mesh, min_size=1024)
        nnx.update(model, jax.device_put(weights, shardings), jax.device_put(rest, whole))
        tx = jaxmp.mixed_precision(optax.adamw(1e-2), "mixed_float16")
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        fsdp = FSDP(shardings=shardings) if split else None

        @nnx.jit
        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            loss = jaxmp.nnx.autocast(
                lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2), "mixed_float16"
            )
            scale = optimizer.loss_scale
            value, grads = jaxmp.nnx.value_and_grad(
                loss, loss_scale=scale, reduce_dtype="float32", fsdp=fsdp
            )(model, batch)
            optimizer.update(model, grads)
            return value

        batch = jax.device_put(random_batch(), NamedSharding(mesh, P("data")))
        losses = [float(step(model, optimizer, batch)) for _ in range(3)]
        kernel = model.up.kernel.get_value()
        assert kernel.sharding.is_equivalent_to(shardings["up"]["kernel"].get_value(), 2)
        return losses, model.norm.mean.get_value()

    (losses, mean), (wanted, wanted_mean) = train(EXPLICIT), train(AUTO)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    np.testing.assert_allclose(mean, wanted_mean, rtol=1e-5)


class Linen(nn.Module):
    """The same in linen."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        h = nn.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16)(tokens)
        h = nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(h)
        return nn.Dense(WIDTH, dtype=jnp.bfloat16)(nn.relu(nn.Dense(HIDDEN, dtype=jnp.bfloat16)(h)))


@pytest.mark.jax
@pytest.mark.parametrize("statistics", [P(), P("data")], ids=["whole", "split"])
def test_collections_keep_their_place(statistics: P) -> None:
    """Also if JAX does not know how the new ones lie: the next step is not traced anew."""
    variables = jax.jit(Linen().init)(jax.random.key(0), random_batch()[0])
    shardings = fully_sharded(variables["params"], MESH, min_size=1024)
    traces = 0

    def loss(params: Any, batch: Any, batch_stats: Any) -> Any:
        nonlocal traces
        traces += 1
        given = {"params": params, "batch_stats": batch_stats}
        made, changed = Linen().apply(given, batch[0], mutable=["batch_stats"])
        return jnp.mean((made.astype(jnp.float32) - batch[1]) ** 2), changed

    state = jaxmp.TrainState.create(
        params=jax.device_put(variables["params"], shardings),
        tx=jaxmp.mixed_precision(optax.adamw(1e-2), "mixed_bfloat16"),
        batch_stats=jax.device_put(variables["batch_stats"], NamedSharding(MESH, statistics)),
    )
    step = jaxmp.make_train_step(loss, fsdp=FSDP(shardings=shardings), microbatches=2)
    batch = jax.device_put(random_batch(), NamedSharding(MESH, P("data")))
    state, _ = step(state, batch)
    first = traces
    for _ in range(2):
        state, _ = step(state, batch)
    assert traces == first
    mean = state.collections["batch_stats"]["BatchNorm_0"]["mean"]
    assert mean.sharding.is_equivalent_to(NamedSharding(MESH, statistics), 1)


@pytest.mark.jax
def test_a_kernel_has_its_second_trace() -> None:
    """`kernels="low"` traces once more with other dtypes, here on explicit axes too."""

    @jax.custom_vjp
    def kernel(x: Any, w: Any) -> Any:
        return words.dot(x, w)

    kernel.defvjp(lambda x, w: (kernel(x, w), (x, w)), words._backward)
    params, x, _ = params_of_words(fsdp=False)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(kernel(x, w) ** 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = jaxmp.autocast(loss, "mixed_bfloat16")
        text = str(jax.make_jaxpr(fast)(params[0], x))
    assert "bf16[64,32] = dot_general" in text


# JAX's own way, without a reduce_dtype.


def plain_loss(params: Any, x: Any, reduced: bool) -> Any:
    if reduced:
        params = jax.tree.map(lambda w: jax.reshard(w, P(reduced={"data"})), params)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    h = jnp.tanh(x.astype(jnp.bfloat16) @ params["up"]) @ params["down"]
    return jnp.mean(h.astype(jnp.float32) ** 2)


def plain_inputs() -> Any:
    random = np.random.default_rng(0)
    shapes = {"up": (16, 8), "down": (8, 4)}
    params = {name: random.normal(size=shape) for name, shape in shapes.items()}
    x = random.normal(size=(64, 16))
    place = [NamedSharding(MESH, spec) for spec in (P(), P("data"))]
    trees = [jax.tree.map(lambda x: x.astype("float32"), tree) for tree in (params, x)]
    return [jax.device_put(tree, sharding) for tree, sharding in zip(trees, place, strict=True)]


@pytest.mark.jax
@pytest.mark.parametrize("reduced", [True, False])
def test_params_that_are_reduced_before_they_are_cast(reduced: bool) -> None:
    """Sums of the others are in bfloat16, the positive control, but for those of jaxmp."""
    loss = lambda params, x: plain_loss(params, x, reduced)  # noqa: E731
    with jax.set_mesh(MESH):
        plain = jaxmp.sharding.collectives(jax.grad(loss), *plain_inputs())
        ours = jaxmp.sharding.collectives(jaxmp.grad(loss, reduce_dtype="float32"), *plain_inputs())
    assert min(report.bytes(reducer="add") for report in (plain, ours)) > 0
    assert (narrow_sums(plain) == 0) is reduced
    assert narrow_sums(ours) == 0
