"""Params split over devices: gathered in 16 bits, their gradients scattered in float32."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp._mesh.fsdp import FSDP, fully_sharded
from tests.support.bits import tree_bits
from tests.support.reduction_checks import (
    GRID,
    MESH,
    compiled,
    gathers,
    narrow_sums,
    ones,
    relative_error,
    reshards,
    split_over,
)
from tests.support.reduction_models import (
    AT_USE,
    AUTOCAST,
    BEFORE,
    MODELS,
    Author,
    batch,
    cases,
    params_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16 = jnp.bfloat16
QUICK = {
    AT_USE: {"matmul", "conv", "tied embeddings", "dense", "scan remat", "experts by index"},
    BEFORE: {"scan remat"},
    AUTOCAST: {"dense", "scan remat"},
}
FAULTS = {(AT_USE, "per example branch"): "gathered in float32"}
# What is made of params before it is gathered: in float32, or by moving parts of params about.
MADE_FIRST = {"lora", "lora in float32", "block of params", "cond unlike"}
# Gathered more than twice: closed over by a loop, which gathers them anew for each part.
IN_LOOPS = {"lax map", "per example loop", "scan shared", "scan carries", "scan carries cast"}


SLOW = {
    AT_USE: set(MODELS),
    AUTOCAST: {"lora", "lora of frozen weights", "weight norm", "scan", "tied embeddings"},
}


def reduced(loss_fn: Any, shardings: Any = None, **options: Any) -> Any:
    fsdp = None if shardings is None else FSDP(shardings=shardings, **options)
    return jaxmp.value_and_grad(loss_fn, reduce_dtype="float32", fsdp=fsdp)


@cases(QUICK, SLOW, FAULTS)
def test_gathers_in_sixteen_bits_and_scatters_in_float32(author: Author, name: str) -> None:
    model = MODELS[name]
    loss_fn, params, examples = (
        author.loss(model.loss),
        params_of(model),
        split_over(batch(), "data"),
    )
    shardings = fully_sharded(params, MESH, min_size=16)
    if all(x.spec == P() for x in jax.tree.leaves(shardings)):
        pytest.skip("its params are too small to be split")
    split = jax.device_put(params, shardings)
    alike = reduced(loss_fn)
    fun = reduced(loss_fn, shardings)

    whole = jaxmp.sharding.collectives(alike, split_over(params), examples)
    report = jaxmp.sharding.collectives(fun, split, examples)
    # The gradient of a maximum of all weights is one number.
    assert narrow_sums(report) <= (2 if name == "max of params" else 0), report
    assert name in MADE_FIRST or reshards(report) <= reshards(whole), report
    # Scales of norms are used in float32, and small. And autocast leaves lookups in float32.
    rows = [row for row in report if row.elements > 64 or row.dtype != "float32"]
    wide = gathers(dataclasses.replace(report, rows=tuple(rows)), "float32")
    left_wide = name in MADE_FIRST or (author is AUTOCAST and name not in QUICK[AUTOCAST])
    assert left_wide or wide <= gathers(whole, "float32"), report
    size = 2 * sum(x.size for x in params.values() if x.ndim > 1)
    carried = gathers(report, "bfloat16")
    assert left_wide or size <= carried, report
    assert carried <= 6 * size or size == 0 or name in IN_LOOPS, report

    loss, grads = compiled(fun)(split, examples)
    wanted_loss, wanted = compiled(alike)(split_over(params), examples)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    assert relative_error(grads, wanted) < 1e-5
    for key, grad in grads.items():
        assert grad.sharding.is_equivalent_to(shardings[key], grad.ndim), key


def scan_case() -> Any:
    """A loss, its params whole, their shardings, the params split, and a batch."""
    model = MODELS["scan remat"]
    params = params_of(model)
    shardings = fully_sharded(params, MESH, min_size=16)
    split = jax.device_put(params, shardings)
    return AT_USE.loss(model.loss), params, shardings, split, split_over(batch(), "data")


def test_left_to_the_partitioner_params_are_gathered_in_float32() -> None:
    """The positive control: what the argument is there for."""
    loss_fn, _, _, split, examples = scan_case()
    report = jaxmp.sharding.collectives(jax.grad(loss_fn), split, examples)
    assert gathers(report, "float32") + reshards(report) + narrow_sums(report) > 0


def test_a_layer_is_gathered_at_a_time() -> None:
    loss_fn, _, shardings, split, examples = scan_case()
    for row in jaxmp.sharding.collectives(reduced(loss_fn, shardings), split, examples):
        assert row.elements <= 16 * 16, row
        assert row.kind != "all-gather" or row.runs == 3, row


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_gather_dtype(dtype: Any) -> None:
    """A float32 loss whose params travel in 16 bits: FSDP2's param_dtype."""
    model = MODELS["dense"]
    params, examples = params_of(model), split_over(batch(), "data")

    def float32_loss(params: Any, examples: Any) -> Any:
        return model.loss(params, examples, lambda w: w)

    shardings = fully_sharded(params, MESH, min_size=16)
    split = jax.device_put(params, shardings)
    fun = reduced(float32_loss, shardings, gather_dtype=dtype)
    report = jaxmp.sharding.collectives(fun, split, examples)
    assert gathers(report, dtype or "float32") > 0
    assert dtype is None or gathers(report, "float32") == 0
    assert narrow_sums(report) == 0
    loss, grads = compiled(fun)(split, examples)
    wanted = compiled(reduced(float32_loss))(params, batch())
    # The params are 16-bit numbers in bfloat16; float16 has more digits.
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    assert relative_error(grads, wanted[1]) < 1e-5


@pytest.mark.parametrize("name", ["dense", "scan remat"])
@pytest.mark.parametrize("layout", ["hybrid", "with tensor parallelism"])
def test_two_mesh_axes(name: str, layout: str) -> None:
    model = MODELS[name]
    loss_fn, params = AT_USE.loss(model.loss), params_of(model)
    if layout == "hybrid":
        shardings = fully_sharded(params, GRID, "model", min_size=16)
        axis, over = "model", ("data", "model")
    else:
        base = {key: P(*[None] * (x.ndim - 1), "model") for key, x in params.items()}
        shardings = fully_sharded(params, GRID, "data", base=base, min_size=128)
        axis, over = "data", "data"
    split = jax.device_put(params, shardings)
    examples = split_over(batch(), over, mesh=GRID)
    fun = reduced(loss_fn, shardings, axis=axis)
    report = jaxmp.sharding.collectives(fun, split, examples)
    over_data = report.select(axis="data")
    assert narrow_sums(over_data) == 0, report
    assert gathers(report.select(axis=axis), "float32") == 0, report
    assert gathers(report.select(axis=axis), "bfloat16") > 0, report
    loss, grads = compiled(fun)(split, examples)
    wanted_loss, wanted = compiled(reduced(loss_fn))(params, batch())
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-3)
    assert relative_error(grads, wanted) < (1e-5 if layout == "hybrid" else 1e-2)
    for key, grad in grads.items():
        assert grad.sharding.is_equivalent_to(shardings[key], grad.ndim), key


@pytest.mark.parametrize("name", ["matmul", "scan", "scan remat"])
@pytest.mark.slow
def test_replicas_sum_parts_of_gradients(name: str) -> None:
    """Gradients are scattered within a replica; plain JAX sums them whole over all devices."""
    model = MODELS[name]
    loss_fn, params = AT_USE.loss(model.loss), params_of(model)
    shardings = fully_sharded(params, GRID, "model", min_size=64)
    split = jax.device_put(params, shardings)
    examples = split_over(batch(), ("data", "model"), mesh=GRID)
    pin = jax.lax.with_sharding_constraint

    def plain(params: Any, examples: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, examples)
        return loss, pin(pin(grads, sharding(mesh=GRID)), shardings)

    # Biases and scales are small, and whole on each device.
    parts = sum(x.size for x in params.values() if x.size >= 64) // GRID.shape["model"]
    for fun, whole in ((reduced(loss_fn, shardings, axis="model"), False), (plain, True)):
        report = jaxmp.sharding.collectives(fun, split, examples)
        rows = [row for row in report.select("all-reduce", axis="data") if row.elements >= 64]
        summed = sum(row.elements * row.runs for row in rows)
        assert {row.axes for row in rows} == {("data", "model") if whole else ("data",)}, report
        assert summed == parts * (GRID.shape["model"] if whole else 1), report


def test_operands_of_gradients_are_not_split() -> None:
    """Operands that nothing else places stay with their examples: here one-hot rows."""

    def loss(params: Any, tokens: Any) -> Any:
        x = jax.nn.one_hot(tokens, 32, dtype=BF16)  # time comes first
        for w in params:
            x = jnp.einsum("tbd,df->tbf", x, w.astype(BF16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = jax.device_put([np.full(s, 1 / s[0]) for s in ((32, 16), (16, 32))])
    shardings = fully_sharded(params, GRID, "model", min_size=16)
    tokens = jax.device_put(np.arange(64).reshape(4, 16) % 32)
    split = jax.device_put(tokens, sharding(None, ("data", "model"), mesh=GRID))
    args = jax.device_put(params, shardings), split
    report = jaxmp.sharding.collectives(reduced(loss, shardings, axis="model"), *args)
    assert reshards(report) == 0, report
    over_all = [row for row in report.select("all-reduce", axis="model") if "data" in row.axes]
    assert [row.elements for row in over_all] == [1], report  # the loss
    got = compiled(reduced(loss, shardings, axis="model"))(*args)
    want = compiled(reduced(loss))(params, tokens)
    assert relative_error(got[1], want[1]) < 1e-5


def test_a_split_loop_dimension_is_gathered_first() -> None:
    loss_fn, params, _, _, examples = scan_case()
    params = {key: jax.device_put(np.concatenate([x, x, x[:2]])) for key, x in params.items()}
    shardings = {key: NamedSharding(MESH, P("data")) for key in params}
    split = jax.device_put(params, shardings)
    said = r"over the dimension along which a param of shape \(8, .*over data.*Split another"
    with pytest.warns(UserWarning, match=said) as warned:
        loss, grads = compiled(reduced(loss_fn, shardings))(split, examples)
    assert warned[0].filename == __file__
    wanted_loss, wanted = compiled(reduced(loss_fn))(params, batch())
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    assert relative_error(grads, wanted) < 1e-5
    with pytest.warns(UserWarning, match=said):
        report = jaxmp.sharding.collectives(reduced(loss_fn, shardings), split, examples)
    assert narrow_sums(report) == 0


def test_activations_of_the_shape_of_a_param_stay_where_they_are() -> None:
    def loss(params: Any, x: Any) -> Any:
        h = jnp.tanh((x + params["positions"]).astype(BF16))
        return jnp.mean((h @ params["w"].astype(BF16)).astype(jnp.float32) ** 2)

    params = {"positions": ones(64, 32), "w": ones(32, 32)}
    shardings = fully_sharded(params, MESH, min_size=16)
    args = jax.device_put(params, shardings), split_over(ones(64, 32), "data")
    ours, plain = (
        jax.jit(fun).lower(*args).compile().cost_analysis()["flops"]
        for fun in (reduced(loss, shardings), jax.value_and_grad(loss))
    )
    assert ours < 1.5 * plain  # on each of eight devices


def test_microbatches_and_16_bit_params() -> None:
    loss_fn, params, shardings, _, examples = scan_case()
    low = jax.device_put(jax.tree.map(lambda x: np.asarray(x, BF16), params), shardings)
    fun = jaxmp.value_and_grad(loss_fn, microbatches=2, fsdp=FSDP(shardings=shardings))
    report = jaxmp.sharding.collectives(fun, low, examples)
    assert narrow_sums(report) == 0
    assert gathers(report, "float32") == 0
    _, grads = compiled(fun)(low, examples)
    _, wanted = compiled(reduced(loss_fn))(params, batch())
    assert relative_error(grads, wanted) < 2e-2
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


def test_several_arguments() -> None:
    model = MODELS["dense"]
    params, examples = params_of(model), split_over(batch(), "data")

    def apart(w: Any, examples: Any, b: Any) -> Any:
        return AT_USE.loss(model.loss)({"w": w, "b": b}, examples)

    shardings = fully_sharded(params, MESH, min_size=128)
    split = jax.device_put(params, shardings)
    fsdp = FSDP(shardings=(shardings["b"], shardings["w"]))
    fun = jaxmp.value_and_grad(apart, argnums=(2, 0), fsdp=fsdp)
    _, (b, w) = compiled(fun)(split["w"], examples, split["b"])
    _, wanted = compiled(reduced(AT_USE.loss(model.loss)))(params, examples)
    assert relative_error({"w": w, "b": b}, wanted) < 1e-5
    assert w.sharding.spec == shardings["w"].spec


@pytest.mark.slow
def test_outside_of_jit() -> None:
    loss_fn, params, shardings, split, examples = scan_case()
    loss, grads = reduced(loss_fn, shardings)(split, examples)
    wanted_loss, wanted = reduced(loss_fn)(params, batch())
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert relative_error(grads, wanted) < 1e-4


def sharding(*spec: Any, mesh: Any = MESH) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


MANUAL = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Manual,))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("shardings", "options", "error", "says"),
    [
        ({"w": P("data")}, {}, TypeError, "must be NamedShardings, got a P.* for 'w'.*make"),
        ({"w": MESH}, {}, TypeError, "must be NamedShardings, got a Mesh for 'w'"),
        ({"w": sharding("data", mesh=MANUAL)}, {}, ValueError, r"Manual.*gather_params"),
        ({"w": sharding("data")}, {"axis": "model"}, ValueError, r"'model'; .* \['data'\]"),
        ({"w": sharding()}, {}, ValueError, "'data'; the shardings use none.*than min_size elem"),
        ({"w": sharding("data")}, {"axis": ("data", "x")}, ValueError, "mesh axis 'x'"),
        ({}, {}, ValueError, "no param is split"),
        ({"w": sharding("data")}, {"gather_dtype": "int8"}, ValueError, "int8"),
        ({"w": sharding("data")}, {"gather_dtype": "float8_e4m3fn"}, ValueError, "float8_e4m3fn"),
        ({"w": sharding("data")}, {"axis": ()}, ValueError, "must name a mesh axis .* none"),
        ({"w": sharding("data")}, {"axis": 3}, ValueError, "must name a mesh axis .* got 3"),
        ({"w": sharding("data")}, {"axis": ""}, ValueError, "must name a mesh axis .* got ''"),
    ],
)
def test_says_what_is_wrong_with_shardings(
    shardings: Any, options: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        FSDP(shardings=shardings, **options)


class WithW(NamedTuple):
    """The leaf of a dictionary, in another tree."""

    w: Any


def dense_loss(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"w": ones(16, 8), "b": ones(8)}, "structure of the params.*is none for 'b'$"),
        ({"v": ones(8)}, "there is none for 'v', and there is no param 'w'"),
        (WithW(ones(16, 8)), "the params are PyTreeDef.*, the shardings PyTreeDef"),
        ({"w": ones(12, 8)}, r"'w' does not fit its shape \(12, 8\)"),
        ({"w": ones()}, r"'w' does not fit its shape \(\): .* at least 1 dim"),
    ],
)
def test_says_what_does_not_fit(params: Any, says: str) -> None:
    fun = jaxmp.value_and_grad(dense_loss, fsdp=FSDP(shardings={"w": sharding("data")}))
    with pytest.raises(ValueError, match=says):
        fun(params, ones(8, 16))


@pytest.mark.usefixtures("unchecked")
def test_says_what_cannot_be_combined() -> None:
    fsdp = FSDP(shardings={"w": sharding("data")})
    with pytest.raises(ValueError, match=r"with fsdp gradients are reduced in float32, got .*bf"):
        jaxmp.value_and_grad(dense_loss, reduce_dtype="bfloat16", fsdp=fsdp)
    wrong: Any = {"w": sharding("data")}
    for make in (jaxmp.value_and_grad, jaxmp.make_train_step):
        with pytest.raises(TypeError, match=r"fsdp must be jaxmp\.sharding\.FSDP.*got dict"):
            make(dense_loss, fsdp=wrong)
    grad = jaxmp.grad(dense_loss, fsdp=fsdp)
    mapped = jax.shard_map(grad, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"over data.* jax\.shard_map .*gather_params"):
        mapped({"w": ones(16, 8)}, ones(8, 16))
    narrow = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
    tx = jaxmp.mixed_precision(optax.sgd(0.1), narrow)
    state = jaxmp.TrainState.create(params={"w": ones(16, 8)}, tx=tx)
    with pytest.raises(ValueError, match="with fsdp gradients are reduced in float32"):
        jaxmp.make_train_step(dense_loss, fsdp=fsdp)(state, split_over(ones(8, 16), "data"))


def test_fully_sharded() -> None:
    params = {
        "big": jax.ShapeDtypeStruct((64, 128), "float32"),
        "small": jax.ShapeDtypeStruct((8,), "float32"),
        "layers": jax.ShapeDtypeStruct((1024, 16, 64), "float32"),
        "scalar": jax.ShapeDtypeStruct((), "float32"),
    }
    specs = {key: x.spec for key, x in fully_sharded(params, MESH).items()}
    assert specs == {
        "big": P(None, "data"),
        "small": P(),
        "layers": P(None, None, "data"),
        "scalar": P(),
    }
    base = {key: P() for key in params} | {"big": P(None, "model")}
    both = fully_sharded(params, GRID, "data", base=base)
    assert both["big"].spec == P("data", "model")
    whole = {key: x.spec for key, x in fully_sharded(params, GRID, ("data", "model")).items()}
    assert whole["big"] == P(None, ("data", "model"))
    # A prefix of a tree of specs, None for none, and what is split over the axis already.
    assert fully_sharded(params, GRID, base=P())["big"].spec == P(None, "data")
    base = base | {"big": None, "layers": P("data")}
    kept = fully_sharded(params, GRID, base=base)
    assert kept["big"].spec == P(None, "data")
    assert kept["layers"].spec == P("data")
    assert fully_sharded({"t": 1.0}, MESH)["t"].spec == P()
    with pytest.raises(ValueError, match="no axis 'x'; it has data"):
        fully_sharded(params, MESH, ("data", "x"))
    with pytest.raises(ValueError, match="must name a mesh axis or several, got none"):
        fully_sharded(params, MESH, ())
    with pytest.raises(ValueError, match="for 'big', but the mesh has no axis 'mlp'; it has "):
        fully_sharded(params, GRID, base=base | {"big": P("mlp")})
    with pytest.raises(ValueError, match="base must be a tree of PartitionSpec like the params"):
        fully_sharded(params, GRID, base={"big": P()})
    with pytest.raises(ValueError, match="'small' has 1 dimensions, too few"):
        fully_sharded(params, MESH, base=base | {"small": P(None, "model")})


def test_large_params_that_cannot_be_split_are_named() -> None:
    odd, small = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((129, 65), (63, 65)))
    text = r"8 devices along 'data' divide no free dimension of 'odd' of shape \(129, 65\), so that"
    with pytest.warns(UserWarning, match=text) as caught:
        shardings = fully_sharded({"odd": odd, "small": small}, MESH, min_size=1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert {x.spec for x in shardings.values()} == {P()}
    with pytest.warns(UserWarning, match=r"'2' of shape \(129, 65\) and 2 more, so that it is not"):
        fully_sharded([odd] * 5, MESH)
    # All of its dimensions are taken, and a part of it is large still.
    both = jax.ShapeDtypeStruct((64, 129), "float32")
    with pytest.warns(UserWarning, match="4 devices along 'data' divide no free dimension"):
        fully_sharded({"w": both}, GRID, base={"w": P("model")})
    # A part is small; split over the axis already; meant to stay whole; nothing to split over.
    vector = jax.ShapeDtypeStruct((4096,), "float32")
    assert fully_sharded({"w": vector}, GRID, base={"w": P("model")})["w"].spec == P("model")
    assert fully_sharded({"w": odd}, MESH, base={"w": P("data")})["w"].spec == P("data")
    assert fully_sharded({"w": odd}, MESH, min_size=2**14)["w"].spec == P()
    alone = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "model"))
    assert fully_sharded({"w": vector}, alone, base={"w": P("model")})["w"].spec == P("model")


def test_empty_leaves() -> None:
    params = {"a": ones(16, 8), "none": None, "b": [None, ones(8, 16)]}
    shardings = fully_sharded(params, MESH, min_size=1)
    assert shardings["none"] is None
    assert shardings["b"][0] is None
    assert [x.spec for x in jax.tree.leaves(shardings)] == [P("data"), P(None, "data")]

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum((x @ p["a"].astype(BF16) @ p["b"][1].astype(BF16)).astype(jnp.float32))

    x = split_over(np.ones((16, 16), BF16), "data")
    _, grads = jax.jit(reduced(loss, shardings))(jax.device_put(params, shardings), x)
    assert grads["none"] is None
    np.testing.assert_array_equal(grads["a"], 16.0 * 16)


def test_constrain_changes_no_number() -> None:
    params = {"w": jax.device_put(np.arange(128.0).reshape(16, 8))}
    fsdp = FSDP(shardings={"w": sharding(None, "data")})
    laid = fsdp.constrain(params)
    assert tree_bits(laid) == tree_bits(params)
    assert laid["w"].sharding.spec == P(None, "data")
