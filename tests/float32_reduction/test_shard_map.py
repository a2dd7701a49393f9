"""Expert, pipeline and other parallel code in a `shard_map` of the loss, with casts by hand."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from tests.support.reduction_checks import (
    GRID,
    MESH,
    compiled,
    narrow_sums,
    relative_error,
    representable,
    split_over,
)
from tests.support.reduction_models import end, relu_dense

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

BF16, F32 = jnp.bfloat16, jnp.float32
BOTH = ("data", "model")


class Sharded(NamedTuple):
    """A program that runs on each device's part of a weight and of a batch.

    Attributes:
      fun: the program, of the weight and the batch.
      shape: that of the whole weight.
      weight: its spec.
      batch: the spec of the batch, and of the result.
      options: of `jax.shard_map`; None for a program that maps parts of itself.
      casts: whether the program casts the weight itself.
    """

    fun: Callable[[Any, Any], Any]
    shape: tuple[int, ...] = (16, 16)
    weight: P = P()
    batch: P = P("data")
    options: dict[str, Any] | None = {}  # noqa: RUF012
    casts: bool = False


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def experts(w: Any, x: Any) -> Any:
    """Each device of a row has one expert, and half of the examples go to each."""
    sent = lax.all_to_all(x.reshape(2, -1, 16), "model", 0, 0, tiled=True)
    made = jnp.tanh(jnp.einsum("bd,edf->bf", sent.reshape(-1, 16), w))
    back = lax.all_to_all(made.reshape(2, -1, 16), "model", 0, 0, tiled=True)
    return back.reshape(x.shape)


def pipeline(w: Any, x: Any) -> Any:
    """Each device of a row has one layer, and the examples go around."""

    def turn(h: Any, _: None) -> Any:
        return lax.ppermute(dense(w[0], h), "model", [(0, 1), (1, 0)]), None

    return lax.scan(turn, x, length=2)[0]


def gathered(w: Any, x: Any) -> Any:
    return dense(lax.all_gather(w, "data", tiled=True), x)


def gathered_layers(w: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return dense(lax.all_gather(w, "data", tiled=True), h), None

    return lax.scan(layer, x, w)[0]


def one_of_each_device(w: Any, x: Any) -> Any:
    return dense(w[lax.axis_index("data") % 4], x)


def branch_of_each_device(w: Any, x: Any) -> Any:
    return lax.switch(lax.axis_index("data") % 2, [dense, lambda w, x: jnp.sin(x @ w)], w, x)


def sums_itself(reduce: Callable[[Any], Any], gather: Callable[[Any], Any]) -> Any:
    """A product whose backward pass adds up the gradients of the devices by hand."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ gather(w)

    def backward(kept: Any, ct: Any) -> Any:
        x, w = kept
        return ct @ gather(w).T, reduce(x.T @ ct)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return lambda w, x: jnp.tanh(product(x, w))


psum_in_backward = sums_itself(lambda dw: lax.psum(dw, "data"), lambda w: w)
scatter_in_backward = sums_itself(
    lambda dw: lax.psum_scatter(dw, "data", tiled=True),
    lambda w: lax.all_gather(w, "data", tiled=True),
)


def within(w: Any, x: Any) -> Any:
    """A `shard_map` over the other axis, in one over the first."""
    inner = jax.shard_map(
        dense,
        in_specs=(P(), P("model")),
        out_specs=P("model"),
        axis_names={"model"},
        check_vma=False,
    )
    return inner(w, x)


def params_out(w: Any, x: Any) -> Any:
    """The weight is a result of the `shard_map`, too."""
    h, again = jax.shard_map(
        lambda w, x: (dense(w, x), w),
        mesh=MESH,
        in_specs=(P(), P("data")),
        out_specs=(P("data"), P()),
    )(w, x)
    return h @ again


def gathered_apart(w: Any, x: Any) -> Any:
    gather = jax.shard_map(
        lambda w: lax.all_gather(w, "data", tiled=True),
        mesh=MESH,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    return dense(gather(w), x)


ONE_AXIS = {
    "a dense layer": Sharded(dense),
    # Unchecked, plain JAX sums behind the cast, in float32.
    "a cast inside": Sharded(
        lambda w, x: dense(w.astype(x.dtype), x), options={"check_vma": True}, casts=True
    ),
    "a weight that is split": Sharded(gathered, weight=P("data")),
    "a loop": Sharded(lambda w, x: lax.scan(lambda h, _: (dense(w, h), None), x, length=2)[0]),
    "custom_vjp": Sharded(
        lambda w, x: relu_dense(x, w, jnp.zeros(16, x.dtype)), options={"check_vma": False}
    ),
    "a lookup": Sharded(lambda w, x: w[(jnp.abs(x) * 8).astype(int) % 16]),
    "params come out": Sharded(params_out, options=None),
    "gathered apart": Sharded(gathered_apart, options=None),
    "layers that are gathered": Sharded(gathered_layers, (3, 16, 16), P(None, "data")),
    "one weight of each device": Sharded(one_of_each_device, (4, 16, 16)),
    "a branch of each device": Sharded(branch_of_each_device),
    "psum by hand": Sharded(psum_in_backward, options={"check_vma": True}),
    "psum_scatter by hand": Sharded(scatter_in_backward, weight=P("data")),
}
TWO_AXES = {
    "experts": Sharded(experts, (2, 16, 16), P("model"), P(BOTH)),
    "pipeline": Sharded(pipeline, (2, 16, 16), P("model"), P(BOTH)),
    "one axis is manual": Sharded(dense, options={"axis_names": {"data"}}),
    "in another": Sharded(within, options={"axis_names": {"data"}, "check_vma": False}),
}
CASES = [
    pytest.param(mesh, sharded._replace(options={"check_vma": vma} | sharded.options), id=name)
    for mesh, table in ((MESH, ONE_AXIS), (GRID, TWO_AXES))
    for kind, sharded in table.items()
    if sharded.options is not None
    for vma, name in ((True, kind), (False, f"{kind}, unchecked"))
    if sharded.options.get("check_vma", vma) is vma
]
CASES += [pytest.param(MESH, x, id=name) for name, x in ONE_AXIS.items() if x.options is None]


def arguments(sharded: Sharded, mesh: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    # What 16 bits hold, so that lookups by it are the same.
    w, x = (
        jax.device_put(random.normal(size=s).astype(BF16).astype(F32))
        for s in (sharded.shape, (512, 16))
    )
    return split_over(w / 4, *sharded.weight, mesh=mesh), split_over(x, *sharded.batch, mesh=mesh)


def mapped(sharded: Sharded, mesh: Any) -> Callable[[Any, Any], Any]:
    if sharded.options is None:
        return sharded.fun
    return jax.shard_map(
        sharded.fun,
        mesh=mesh,
        in_specs=(sharded.weight, sharded.batch),
        out_specs=sharded.batch,
        **sharded.options,
    )


@pytest.mark.parametrize(("mesh", "sharded"), CASES)
def test_weights_in_a_shard_map_are_summed_in_float32(mesh: Any, sharded: Sharded) -> None:
    """Plain JAX adds up in 16 bits; and with one manual axis it ends the process on a CPU."""
    w, x = arguments(sharded, mesh)

    def loss(w: Any, x: Any, dtype: Any = BF16) -> Any:
        w = w if sharded.casts else w.astype(dtype)
        return end(mapped(sharded, mesh)(w, x.astype(dtype)))

    ours = jaxmp.value_and_grad(loss, reduce_dtype="float32")
    value, grad = compiled(ours)(w, x)
    assert value == compiled(loss)(w, x)
    assert representable(grad, BF16) < 0.6
    assert relative_error(grad, compiled(jax.grad(lambda w, x: loss(w, x, F32)))(w, x)) < 0.03
    assert narrow_sums(jaxmp.sharding.collectives(ours, w, x)) == 0
    assert narrow_sums(jaxmp.sharding.collectives(jax.grad(loss), w, x)) > 0  # positive control


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "O1"])
@pytest.mark.parametrize("set_mesh", [False, True])
def test_a_train_step_with_a_shard_map(policy: str, set_mesh: bool) -> None:
    """The check of sums sees into a `shard_map`, whether it is right or wrong there."""
    mesh = {} if set_mesh else {"mesh": MESH}
    fun = jax.shard_map(dense, in_specs=(P(), P("data")), out_specs=P("data"), **mesh)

    def loss(params: Any, x: Any) -> Any:
        return end(fun(params["w"].astype(BF16), x.astype(BF16)))

    w, x = arguments(Sharded(dense), MESH)
    with jax.set_mesh(MESH) if set_mesh else contextlib.nullcontext():
        tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
        state = jaxmp.TrainState.create(params={"w": w}, tx=tx)
        step = jaxmp.make_train_step(loss, policy, donate=False)
        jaxmp.assert_reduced_in(step, "float32", state, x, axis="data")
        with pytest.raises(jaxmp.AuditError, match="bfloat16  all-reduce over data"):
            jaxmp.assert_reduced_in(jax.grad(loss), "float32", state.params, x, axis="data")


def test_a_sum_of_weights_that_the_loss_asks_for_keeps_its_dtype() -> None:
    """The loss keeps its bits and its gradient is float32; who checks sums names this one."""

    def averaged(w: Any, x: Any) -> Any:
        return dense(lax.pmean(w[0], "data"), x)

    sharded = Sharded(averaged, (8, 16, 16), P("data"))
    w, x = arguments(sharded, MESH)

    def loss(w: Any, x: Any) -> Any:
        return end(mapped(sharded, MESH)(w.astype(BF16), x.astype(BF16)))

    ours = jaxmp.grad(loss, reduce_dtype="float32")
    sums = [row for row in jaxmp.sharding.collectives(ours, w, x) if row.sums and row.elements > 1]
    assert sorted(row.dtype for row in sums) == ["bfloat16", "float32"]
    with pytest.raises(jaxmp.AuditError, match="bfloat16  all-reduce over data"):
        jaxmp.assert_reduced_in(ours, "float32", w, x, axis="data")
    jaxmp.assert_reduced_in(ours, "float32", w, x, axis="data", activations="averaged")
