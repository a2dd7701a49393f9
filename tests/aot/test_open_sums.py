"""Sums over TPUs stay float32 where only a cast or a product reads them.

XLA runs such sums in bfloat16, unless they are rounded in the open. The kinds of
`computed_weights.py` have such sums in their gradients, two also in their values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP
from tests.aot.conftest import Compiler, compiler_for_tpus
from tests.support import computed_weights as models
from tests.support.reduction_matrix import narrow_sums
from tests.support.sharded_models import abstract

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

BF16 = "mixed_bfloat16"
# Before each change lands; the others take turns.
FIRST = ("lora", "lora, merged in float32", "layers", "table of factors", "hypernetwork")
KINDS = [
    pytest.param(kind, marks=() if kind in FIRST else pytest.mark.exhaustive)
    for kind in models.KINDS
]
# The value of a product of split params is a sum too, and has the dtype of the model.
OF_VALUES = frozenset(
    {"three factors", "hypernetwork", "kronecker", "cayley", "experts", "dora", "weight norm"}
    | {"convolution of factors", "convolution of factors, in float32", "sorted"}
)


def autocast(kind: str) -> Any:
    return jaxmp.autocast(models.in_float32(kind), BF16)


LOSSES: dict[str, Callable[[str], Any]] = {
    "by hand": models.by_hand,
    "autocast": autocast,
    "float32": models.in_float32,
}


def everywhere(tree: Any, mesh: Mesh, *spec: Any) -> Any:
    return jax.tree.map(lambda _: NamedSharding(mesh, P(*spec)), tree)


def split_over(shapes: dict[str, tuple[int, ...]], mesh: Mesh, axis: str) -> dict[str, Any]:
    """Splits the largest dimension of each param, if the axis divides it."""

    def split(shape: tuple[int, ...]) -> NamedSharding:
        largest = max(range(len(shape)), key=lambda i: shape[i])
        fits = shape[largest] % mesh.shape[axis] == 0
        return NamedSharding(mesh, P(*[None] * largest, axis) if fits else P())

    return {name: split(shape) for name, shape in shapes.items()}


def narrow(program: Any, mesh: Mesh, *axes: str) -> int:
    report = jaxmp.sharding.collectives(program.compile(), mesh=mesh)
    assert any(row.sums and set(axes) & set(row.axes or ()) for row in report), report
    return sum(narrow_sums(report, axis) for axis in axes)


def data_parallel(kind: str, gradient: Any, mesh: Mesh) -> int:
    params, batch = models.KINDS[kind].params(), models.batch()
    whole = everywhere(params, mesh)
    args = abstract(params, whole), abstract(batch, everywhere(batch, mesh, "data"))
    return narrow(jax.jit(gradient, out_shardings=whole).lower(*args), mesh, "data")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("author", LOSSES)
def test_weights_that_are_computed(tpu: Compiler, kind: str, author: str) -> None:
    mesh = tpu.mesh((8,), ("data",))
    loss = LOSSES[author](kind)
    assert data_parallel(kind, jaxmp.grad(loss, reduce_dtype="float32"), mesh) == 0
    # Positive control. (A spectral norm scales its sum of squares before the cast, so that plain
    # JAX is right there.)
    if author == "by hand" and kind != "spectral norm":
        assert data_parallel(kind, jax.grad(loss), mesh) > 0


# A weight that autocast knows is made of arguments: merged by an addition, a table, rows.
ALONE = ("lora", "lora, merged in float32", "dora", "layers", "table of factors", "qkv")
ALONE += ("sorted", "in a branch", "sum before a product", "relu of a sum before a product")


@pytest.mark.parametrize("kind", ALONE)
def test_autocast_alone(tpu: Compiler, kind: str) -> None:
    mesh = tpu.mesh((8,), ("data",))
    assert data_parallel(kind, jax.grad(autocast(kind)), mesh) == 0
    assert data_parallel(kind, jax.grad(models.by_hand(kind)), mesh) > 0


def test_rows_that_edges_read(tpu: Compiler) -> None:
    """Activations, whose gradients autocast sums in float32, over devices too."""
    mesh = tpu.mesh((8,), ("data",))

    def loss(w: Any, nodes: Any, senders: Any) -> Any:
        return jnp.sum(jnp.square(jnp.tanh((nodes @ w)[senders]) * 1.5))

    def program(fun: Any) -> Any:
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        args = (
            jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=whole),
            jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=whole),
            jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=split),
        )
        return jax.jit(fun, out_shardings=whole).lower(*args)

    def by_hand(w: Any, nodes: Any, senders: Any) -> Any:
        low = jnp.bfloat16
        rows = (nodes.astype(low) @ w.astype(low))[senders]
        return jnp.sum(jnp.square((jnp.tanh(rows) * 1.5).astype(jnp.float32)))

    assert narrow(program(jax.grad(jaxmp.autocast(loss, BF16))), mesh, "data") == 0
    assert narrow(program(jaxmp.grad(by_hand, reduce_dtype="float32")), mesh, "data") == 0
    assert narrow(program(jax.grad(by_hand)), mesh, "data") > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["h100", "v6e:2x4", "tpu7x:2x2x1"])
def test_other_devices(request: pytest.FixtureRequest, kind: str, device: str) -> None:
    """GPUs sum what is written, and other TPUs than a v5e as that does."""
    compiler = compiler_for_tpus(device) if ":" in device else request.getfixturevalue("gpu")
    mesh = compiler.mesh((8,), ("data",))
    assert data_parallel(kind, jaxmp.grad(models.by_hand(kind), reduce_dtype="float32"), mesh) == 0


def spread(kind: str, mode: str, author: str, tpu: Compiler) -> tuple[Any, Mesh, tuple[str, ...]]:
    """A program, its mesh, and the axes that the batch is split over."""
    shapes, loss = models.KINDS[kind].shapes, LOSSES[author](kind)
    params, batch = models.KINDS[kind].params(), models.batch()
    shape, names = ((4, 2), ("data", "model")) if mode in ("tp", "hsdp") else ((8,), ("data",))
    mesh = tpu.mesh(shape, names)
    if mode == "explicit":
        mesh = Mesh(mesh.devices, names, axis_types=(AxisType.Explicit,) * len(names))
    over = names if mode == "hsdp" else ("data",)
    stored = everywhere(params, mesh)
    options: dict[str, Any] = {"reduce_dtype": "float32"}
    if mode in ("fsdp", "hsdp"):
        stored = split_over(shapes, mesh, names[-1])
        options["fsdp"] = FSDP(shardings=stored, axis=names[-1])
    if mode == "tp":
        stored = split_over(shapes, mesh, "model")
    if mode == "microbatches":
        options["microbatches"] = 2
    gradient = jaxmp.grad(loss, **options)
    if mode == "shard_map":
        specs = P(), P("data")
        gradient = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P())
    args = abstract(params, stored), abstract(batch, everywhere(batch, mesh, over))
    out = None if mode in ("shard_map", "explicit") else stored
    return jax.jit(gradient, out_shardings=out).lower(*args), mesh, over


MODES = ("fsdp", "hsdp", "tp", "shard_map", "microbatches", "explicit")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("author", ["by hand", "autocast"])
def test_every_mode(tpu: Compiler, kind: str, mode: str, author: str) -> None:
    if mode in ("fsdp", "hsdp", "tp") and kind in OF_VALUES:
        pytest.skip("also sums values of split params, in the dtype of the model")
    program, mesh, over = spread(kind, mode, author, tpu)
    assert narrow(program, mesh, *over) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [BF16, "mixed_float16", f"{BF16},products=int8", "mixed_float8"])
@pytest.mark.filterwarnings("ignore:a policy asks for products in 8 bits")
def test_train_steps(tpu: Compiler, kind: str, policy: str) -> None:
    mesh = tpu.mesh((8,), ("data",))
    shapes, batch = models.KINDS[kind].shapes, models.batch()
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), policy)

    def create() -> Any:
        params = {name: jnp.ones(shape) for name, shape in shapes.items()}
        return jaxmp.TrainState.create(params=params, tx=tx)

    state = jax.eval_shape(create)
    args = (
        abstract(state, everywhere(state, mesh)),
        abstract(batch, everywhere(batch, mesh, "data")),
    )
    step = jaxmp.make_train_step(models.in_float32(kind))
    assert narrow(step.lower(*args), mesh, "data") == 0


def test_a_program_for_tpus_is_refused(tpu: Compiler) -> None:
    """`assert_reduced_in` sees what the lowered program does not show."""
    mesh = tpu.mesh((8,), ("data",))
    whole = NamedSharding(mesh, P())

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ (p["a"] @ p["b"])))

    shapes = {"a": (128, 16), "b": (16, 128)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
        for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def of(gradient: Any) -> Any:
        return jax.jit(gradient, out_shardings=whole).lower(params, x)

    # All of it is float32, as it is written and as it is lowered.
    assert "bf16" not in of(jax.grad(loss)).as_text()
    with pytest.raises(jaxmp.AuditError, match=r"bfloat16  all-reduce over data"):
        jaxmp.assert_reduced_in(of(jax.grad(loss)), "float32")
    jaxmp.assert_reduced_in(of(jaxmp.grad(loss, reduce_dtype="float32")), "float32")


def test_the_kinds_are_many() -> None:
    assert len(models.KINDS) == 50  # as docs/why.md says
    assert set(FIRST) | OF_VALUES | set(ALONE) <= models.KINDS.keys()
    assert np.prod(models.KINDS["lora"].shapes["a"]) == models.WIDTH * models.RANK
