"""The train step of live nnx modules: as the step of params, in place, and with one walk."""

import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from jaxmp.sharding import FSDP, fully_sharded
from tests.support.bits import tree_bits
from tests.support.compilations import Count

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

RNG = np.random.default_rng(1)
BATCH = {
    "x": RNG.standard_normal((16, 8), np.float32),
    "y": RNG.standard_normal((16, 4), np.float32),
}
SGD = optax.sgd(0.1, momentum=0.9)  # Adam makes steps of rounding errors, where a gradient is zero
RULES = jaxmp.PolicyRules({"head": "float32", "type:BatchNorm": "float32"}, default="mixed_float16")


class Net(nnx.Module):
    """Has params, statistics, keys, a tree in a variable, a plain array and a shared layer."""

    def __init__(self, layers: int = 12) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Linear(8, 16, rngs=rngs)
        # More than ten: as text, "10" comes before "2".
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(layers)])
        self.again = self.layers[0]
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)
        self.cache = nnx.Cache({"calls": np.int32(0), "mean": np.zeros(16, np.float32)})
        self.offset = nnx.data(jax.device_put(np.float32(0)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x) + self.offset
        for layer in (*self.layers, self.again):
            x = x + 0.1 * nnx.relu(layer(x))
        cache = self.cache.get_value()
        self.cache.set_value({"calls": cache["calls"] + 1, "mean": x.astype(np.float32).mean(0)})
        self.offset = self.offset + 0.5
        return self.head(self.dropout(self.norm(x)))


def loss_fn(model: Net, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


new_net = nnx.jit(Net, static_argnums=0)


def created(
    policy: Any = "mixed_bfloat16", optimizer: Any = None, **options: Any
) -> tuple[Net, jaxmp.nnx.Optimizer]:
    """A model and its optimizer, made by one program."""
    tx = jaxmp.mixed_precision(optimizer or optax.adam(1e-2), policy)
    make = nnx.jit(lambda: (model := Net(), jaxmp.nnx.Optimizer(model, tx, **options)))
    model, optimizer = make()
    return model, optimizer


def bits_of(*modules: Any) -> Any:
    return [tree_bits(nnx.as_pure(nnx.state(module))) for module in modules]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", RULES])
def test_steps_are_those_of_a_loop_by_hand(policy: Any, microbatches: int) -> None:
    """Params, statistics, keys, moments and scale are equal bits after three steps."""

    @nnx.jit
    def by_hand(model: Net, optimizer: jaxmp.nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = jaxmp.nnx.value_and_grad(
            jaxmp.nnx.autocast(loss_fn, policy, recompute="loops"),
            loss_scale=optimizer.loss_scale,
            microbatches=microbatches,
            reduce_dtype=jnp.float32,
        )(model, batch)
        optimizer.update(model, grads, value=loss)
        return loss

    ours, theirs = created(policy), created(policy)
    step = jaxmp.nnx.make_train_step(loss_fn, microbatches=microbatches)
    for _ in range(3):
        metrics, loss = step(*ours, BATCH), by_hand(*theirs, BATCH)
    assert metrics["loss"] == loss
    assert bits_of(*ours) == bits_of(*theirs)
    assert ours[0].cache.get_value()["calls"] == 3 * microbatches
    assert ours[0].again is ours[0].layers[0]


def test_a_skipped_step_keeps_every_bit_of_the_model() -> None:
    model, optimizer = created("mixed_float16")
    step = jaxmp.nnx.make_train_step(loss_fn)
    step(model, optimizer, BATCH)
    before, scale = bits_of(model), float(optimizer.loss_scale.scale)
    metrics = step(model, optimizer, BATCH | {"x": 1e30 * BATCH["x"]})
    assert not metrics["grads_finite"]
    assert bits_of(model) == before
    assert float(optimizer.loss_scale.scale) == scale / 2
    assert int(optimizer.step[...]) == 1
    step(model, optimizer, BATCH)
    assert bits_of(model) != before


def test_one_trace_until_the_model_changes(compilations: Count) -> None:
    """Whatever nnx.jit would trace anew for is noticed, and nothing else."""
    traces = 0

    def counted(model: Net, batch: Any) -> jax.Array:
        nonlocal traces
        traces += 1
        return loss_fn(model, batch)

    model, optimizer = created()
    step = jaxmp.nnx.make_train_step(counted)

    def traces_of_a_step() -> int:
        before = traces
        step(model, optimizer, BATCH)
        return traces - before

    first = traces_of_a_step()
    programs = compilations()
    assert [traces_of_a_step() for _ in range(3)] == [0, 0, 0]
    model.eval()
    model.train()
    assert traces_of_a_step() == 0
    assert compilations() == programs
    model.eval()
    assert traces_of_a_step() == first
    model.train()
    assert traces_of_a_step() == 0  # it is known
    model.norm.mean.set_metadata(note="other metadata")
    assert traces_of_a_step() == first
    model.more = nnx.BatchStat(np.zeros(2, np.float32))
    assert traces_of_a_step() == first
    model.layers[3] = nnx.Linear(16, 16, rngs=nnx.Rngs(5))
    kernel = np.asarray(model.layers[3].kernel[...])
    assert traces_of_a_step() == 0  # the same structure: the program is known, the variables not
    assert (np.asarray(model.layers[3].kernel[...]) != kernel).any()
    model.layers[3].kernel = nnx.Param(kernel)
    assert traces_of_a_step() == 0
    assert (np.asarray(model.layers[3].kernel[...]) != kernel).any()
    model, optimizer = created()
    assert traces_of_a_step() > 0  # an optimizer is a program of its own


def test_what_is_not_trained_keeps_its_bits_and_is_not_tested() -> None:
    """A frozen base of a large model is not read for infinities in each step."""
    head = nnx.All(nnx.Param, nnx.PathContains("head"))
    model, optimizer = created(wrt=head)
    before = bits_of(model.stem, model.layers)
    kernel = np.asarray(model.head.kernel[...])
    step = jaxmp.nnx.make_train_step(loss_fn)
    step(model, optimizer, BATCH)
    assert bits_of(model.stem, model.layers) == before
    assert (np.asarray(model.head.kernel[...]) != kernel).any()

    def tests(*modules: Any) -> int:
        return str(step.trace(*modules, BATCH).jaxpr).count("is_finite")

    assert tests(model, optimizer) == tests(*created())


def test_aux_counts_histograms_and_release() -> None:
    def with_aux(model: Net, batch: Any) -> Any:
        return loss_fn(model, batch), {"largest": batch["x"].max()}

    step = jaxmp.nnx.make_train_step(
        with_aux, has_aux=True, count_overflows=True, histograms_every=1
    )
    metrics = step(*created(), BATCH)
    assert metrics["aux"]["largest"] == BATCH["x"].max()
    assert set(nnx.to_pure_dict(metrics["nonfinite"])) == {
        *("again", "head", "layers", "norm", "stem")
    }
    assert "histograms" in metrics


class Scan(nnx.Module):
    """Stacked layers, by a scan."""

    def __init__(self) -> None:
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = make(nnx.Rngs(0).split(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nnx.scan(lambda x, layer: x + nnx.relu(layer(x)), out_axes=nnx.Carry)
        return layers(x, self.layers)


def test_gradients_may_be_released() -> None:
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    bits = []
    for gradients in ("released", "buffered"):
        model = Scan()
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        step = jaxmp.nnx.make_train_step(
            lambda model, x: jnp.mean(model(x) ** 2),
            gradients=gradients,  # type: ignore[arg-type]
        )
        step(model, optimizer, BATCH["x"])
        bits.append(bits_of(model, optimizer))
    assert bits[0] == bits[1]


def test_old_arrays_are_donated_and_those_of_others_are_not() -> None:
    model, optimizer = created()
    step = jaxmp.nnx.make_train_step(loss_fn)
    start = nnx.clone(model)
    step(model, optimizer, BATCH)
    bits_of(start)  # what was there before the first step is alive
    shared = nnx.clone(model)
    kept = jax.tree.map(jnp.copy, nnx.state(model))
    old = model.head.kernel[...]
    step(model, optimizer, BATCH)
    assert old.is_deleted()
    with pytest.raises(ValueError, match=r"are gone: .* nnx.clone\(model\) and nnx.state"):
        step(shared, optimizer, BATCH)
    for _ in range(2):  # a state that is put back twice
        nnx.update(model, kept)
        step(model, optimizer, BATCH)
    keeping = jaxmp.nnx.make_train_step(loss_fn, donate=False)
    old = model.head.kernel[...]
    keeping(model, optimizer, BATCH)
    assert not old.is_deleted()


def test_a_step_keeps_no_model_alive() -> None:
    model, optimizer = created()
    step = jaxmp.nnx.make_train_step(loss_fn)
    step(model, optimizer, BATCH)
    array = weakref.ref(model.head.kernel[...])
    dead = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert dead() is None
    assert array() is None


def test_a_model_that_casts_and_one_that_does_not() -> None:
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    model = jaxmp.nnx.apply_policy(new_net(12), "mixed_bfloat16")
    step = jaxmp.nnx.make_train_step(loss_fn, "none")
    step(model, jaxmp.nnx.Optimizer(model, tx), BATCH)
    with pytest.warns(UserWarning, match="all products behind its gradients are float32"):
        step(*created(), BATCH)


def test_a_policy_that_stores_params_in_16_bits_casts_them_once() -> None:
    """The first masters are the float32 values, as of TrainState.create."""
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bfloat16", master="remainder")
    model = new_net(2)
    state = jaxmp.TrainState.create(params=nnx.as_pure(nnx.state(model, nnx.Param)), tx=tx)
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    assert tree_bits(nnx.as_pure(nnx.state(model, nnx.Param))) == tree_bits(state.params)
    assert tree_bits(nnx.as_pure(optimizer.opt_state)) == tree_bits(state.opt_state)
    ruled = jaxmp.nnx.apply_policy(new_net(2), jaxmp.rules.keep_norms_float32("bfloat16"))
    jaxmp.nnx.Optimizer(ruled, tx)
    assert ruled.norm.scale[...].dtype == jnp.float32


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_eight_devices_are_as_one(
    policy: str, is_split: bool, kind: AxisType, compilations: Count
) -> None:
    alone = created(policy, SGD)
    step = jaxmp.nnx.make_train_step(loss_fn)
    losses = [step(*alone, BATCH)["loss"] for _ in range(3)]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    model = new_net(12)
    params = nnx.state(model, nnx.Param)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = (
        fully_sharded(params, mesh, min_size=64)
        if is_split
        else jax.tree.map(lambda _: everywhere, params)
    )
    nnx.update(model, jax.device_put(params, shardings))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(SGD, policy))
    batch = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    fsdp = FSDP(shardings=shardings) if is_split else None
    sharded_step = jaxmp.nnx.make_train_step(loss_fn, fsdp=fsdp)
    with jax.set_mesh(mesh):
        first = sharded_step(model, optimizer, batch)["loss"]
        programs = compilations()
        further = [sharded_step(model, optimizer, batch)["loss"] for _ in range(2)]
    assert compilations() == programs
    np.testing.assert_allclose(first, losses[0], rtol=1.2e-6)
    np.testing.assert_allclose(further, losses[1:], rtol=1e-3)  # sums decide roundings
    spec = model.head.kernel[...].sharding.spec
    assert ("data" in spec) == is_split
    assert model.norm.mean[...].sharding.is_fully_replicated


def test_under_another_trace() -> None:
    """As audits do it; under nnx.jit, too."""
    ours, theirs = created(), created()
    step = jaxmp.nnx.make_train_step(loss_fn)
    step(*theirs, BATCH)
    nnx.jit(step)(*ours, BATCH)
    assert bits_of(*ours) == bits_of(*theirs)
    report = jaxmp.audit(step, *theirs, batch=BATCH)
    report.check(products="bfloat16")


def test_a_step_is_lowered_without_arrays() -> None:
    tx = jaxmp.mixed_precision(SGD, "mixed_bfloat16")
    make = lambda: (model := Net(), jaxmp.nnx.Optimizer(model, tx))  # noqa: E731
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    step = jaxmp.nnx.make_train_step(loss_fn)
    assert "bf16" in step.lower(*nnx.eval_shape(make), batch).as_text()


def evaluating(model: Net, batch: Any) -> jax.Array:
    model.eval()
    return loss_fn(model, batch)


def adding(model: Net, batch: Any) -> jax.Array:
    model.seen = nnx.BatchStat(batch["x"])
    return loss_fn(model, batch)


def writing(model: Net, batch: Any) -> jax.Array:
    model.stem.kernel[...] *= 0.5
    return loss_fn(model, batch)


def reshaping(model: Net, batch: Any) -> jax.Array:
    loss = loss_fn(model, batch)
    model.norm.mean.set_raw_value(jnp.zeros(3))
    return loss


@pytest.mark.parametrize(
    ("loss", "has_aux", "error", "text"),
    [
        (evaluating, False, ValueError, "replaces a module, or an attribute that is no array, as"),
        (adding, False, ValueError, r"adds \['seen'\], and a step keeps the structure"),
        (reshaping, False, ValueError, r"'norm'.*'mean'.* has shape \(3,\)"),
        (loss_fn, True, TypeError, r"must return \(loss, aux\) here, got float32\[\]"),
        (lambda m, b: (loss_fn(m, b), 1), False, TypeError, "a tuple of 2. For another output"),
        (lambda m, b: m(b["x"]), False, TypeError, "must be a float scalar"),
    ],
)
def test_what_a_loss_may_not_do(
    loss: Callable[..., Any], has_aux: bool, error: type[Exception], text: str
) -> None:
    """And nothing is changed by it."""
    model, optimizer = created()
    before = bits_of(model, optimizer)
    with pytest.raises(error, match=text):
        jaxmp.nnx.make_train_step(loss, has_aux=has_aux)(model, optimizer, BATCH)
    assert bits_of(model, optimizer) == before


@pytest.mark.usefixtures("unchecked")
def test_what_a_step_may_not_be_called_with() -> None:
    step = jaxmp.nnx.make_train_step(loss_fn)
    model, optimizer = created()
    plain = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    calls: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((optimizer, model, BATCH), TypeError, "the model, then its optimizer"),
        ((nnx.state(model), optimizer, BATCH), TypeError, "a live nnx module .* got State"),
        ((model, plain, BATCH), TypeError, r"takes jaxmp.nnx.Optimizer\(model, .* got Optimizer"),
        ((model, optimizer, [BATCH, other]), TypeError, "the batch holds Linear, whose changes"),
        ((other, optimizer, BATCH), ValueError, "made for other params: only one of the two has"),
    ]
    for args, error, text in calls:
        with pytest.raises(error, match=text):
            step(*args)
    with pytest.raises(TypeError, match="takes a loss function, got int"):
        jaxmp.nnx.make_train_step(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contradict each other: who casts"):
        jaxmp.nnx.make_train_step(loss_fn, "none", cast="all")
    step(model, optimizer, BATCH)  # none of them did harm


class Transformer(nnx.Module):
    """Attention with dropout, and batch norm."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, 32, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = self.dropout(x + self.attention(self.norm(x)))
        return self.head(x)


def next_token(model: Transformer, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", RULES])
def test_a_run_is_resumed_to_the_same_bits(policy: Any, tmp_path: pathlib.Path) -> None:
    """With dropout keys, statistics, scale and moments, by orbax, into new modules."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy)
    tokens = np.random.default_rng(0).integers(16, size=(6, 4, 9))

    def new() -> tuple[Transformer, jaxmp.nnx.Optimizer, Any]:
        model = Transformer()
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        return model, optimizer, jaxmp.nnx.make_train_step(next_token)

    def states(model: Any, optimizer: Any) -> Any:
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    model, optimizer, step = new()
    for part in tokens[:3]:
        step(model, optimizer, part)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", states(model, optimizer))
    losses = [float(step(model, optimizer, part)["loss"]) for part in tokens[3:]]
    again, again_optimizer, again_step = new()
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "half", states(again, again_optimizer))
    nnx.update(again, saved["model"])
    nnx.update(again_optimizer, saved["optimizer"])
    assert losses == [float(again_step(again, again_optimizer, x)["loss"]) for x in tokens[3:]]
    assert bits_of(again, again_optimizer) == bits_of(model, optimizer)
    jaxmp.check_progress(again_optimizer, losses[-1])


class Rewriting(nnx.Module):
    """Passes its layer through a transformation, which writes all variables of it back."""

    def __init__(self, transform: Any) -> None:
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.transform = transform

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.transform(lambda layer, x: layer(x))(self.layer, x)


def plain(fun: Any) -> Any:
    return fun


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_transformations_of_nnx_in_a_model(transform: Any) -> None:
    tx = jaxmp.mixed_precision(SGD, "mixed_bfloat16")
    bits = []
    for each in (transform, plain):
        model = Rewriting(each)
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        step = jaxmp.nnx.make_train_step(lambda m, x: jnp.mean(m(x) ** 2))
        for _ in range(2):
            step(model, optimizer, BATCH["x"])
        bits.append(bits_of(model))
    assert bits[0] == bits[1]


class Odd(nnx.Module):
    """What a step cannot hash, and arrays in containers."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.sizes = [8, 8]
        self.tables = nnx.data({"a": jax.device_put(np.float32(1))})
        self.more = nnx.List([jax.device_put(np.float32(2))])
        self.cache = nnx.Cache({"calls": np.int32(0)})

    def __call__(self, x: jax.Array) -> jax.Array:
        self.cache["calls"] = self.cache["calls"] + 1  # in place
        self.tables["a"] = self.tables["a"] * 2
        self.more[0] = self.more[0] + 1
        return self.layer(x) * len(self.sizes)


def test_lists_dictionaries_and_items() -> None:
    model = Odd()
    tx = jaxmp.mixed_precision(optax.sgd(1e-6), "mixed_bfloat16")
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    step = jaxmp.nnx.make_train_step(lambda m, x: jnp.mean(m(x) ** 2))
    for _ in range(2):
        first = step(model, optimizer, BATCH["x"])["loss"]
    assert model.cache.get_value()["calls"] == 2
    assert (float(model.tables["a"]), float(model.more[0])) == (4, 4)
    model.sizes.append(8)
    assert step(model, optimizer, BATCH["x"])["loss"] > 2 * first  # a list is looked at, too
    model.more.pop()
    model.more.append(jax.device_put(np.float32(2)))
    model.cache.set_value({"calls": np.int32(0), "other": np.int32(0)})
    step(model, optimizer, BATCH["x"])
    assert sorted(model.cache.get_value()) == ["calls", "other"]


def test_a_learning_rate_is_set_between_steps() -> None:
    """In both ways of optax: the variable's value, and the item of the dictionary."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    inner = optax.inject_hyperparams(optax.sgd)(0.1)
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(inner, "mixed_bfloat16"))
    step = jaxmp.nnx.make_train_step(lambda m, x: jnp.mean(m(x) ** 2))

    def moves() -> bool:
        before = np.array(model.kernel[...])
        step(model, optimizer, BATCH["x"])
        return bool((np.asarray(model.kernel[...]) != before).any())

    rates = optimizer.opt_state.inner.hyperparams
    assert moves()
    rates["learning_rate"][...] = jnp.float32(0)
    assert not moves()
    rates["learning_rate"] = jnp.float32(0.1)
    assert moves()
    rates["learning_rate"] = jnp.float32(0)
    assert not moves()


def test_an_update_of_its_own_is_not_passed_over() -> None:
    class Averaging(jaxmp.nnx.Optimizer):
        def update(self, model: Any, grads: Any, /, **extra: Any) -> Any:
            return super().update(model, grads, **extra)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = Averaging(model, jaxmp.mixed_precision(SGD, "mixed_bfloat16"))
    with pytest.raises(TypeError, match="Averaging has an update of its own, which a step does no"):
        jaxmp.nnx.make_train_step(loss_fn)(model, optimizer, BATCH)
