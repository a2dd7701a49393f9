"""The peak of a plan is what the compilers for an H100 and a TPU v5e say of the same step."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp._tools.planning.memory_rows import MemoryPlan
from jaxmp.diagnostics import absent_devices, memory_plan
from jaxmp.sharding import FSDP, fully_sharded
from tests.aot.conftest import Compiler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def arrays(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def small(device: str, **options: Any) -> MemoryPlan:
    w, x = arrays((512, 512), (64, 512))
    return memory_plan(w, loss_fn=loss_fn, batch=x, device=device, **options)


@pytest.mark.parametrize("device", ["h100", "v5e"])
def test_a_compiler_says_the_peak(device: str, gpu: Compiler, tpu: Compiler) -> None:
    plan = small(device)
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "mixed_bfloat16")
    w, x = arrays((512, 512), (64, 512))
    state = jax.eval_shape(lambda w: jaxmp.TrainState.create(params=w, tx=tx), w)
    step = jaxmp.make_train_step(loss_fn, "mixed_bfloat16")
    compiler = gpu if device == "h100" else tpu
    memory: Any = compiler(step, state, x, donate=(0,)).memory_analysis()
    assert plan.peak == memory.peak_memory_in_bytes
    assert plan.bytes_of("params") == 4 * 512 * 512
    assert plan.is_complete
    assert plan.bytes_of("gradients") == 0 < plan.bytes_of("compiled")
    # The least that a plan says without a compiler is no more.
    assert plan.peak >= plan.persistent + plan.bytes_of("batch") + 4 * plan.params
    kept = small(device, donate=False)
    assert kept.peak >= plan.peak + plan.persistent / 2


def test_a_step_that_does_not_fit(tpu: Compiler) -> None:
    """The compiler of a TPU makes no program then, and says how much it would take."""
    w, x = arrays((1024, 1024), (2**22, 1024))
    plan = memory_plan(w, "mixed_bfloat16", loss_fn, x, device="v5e")
    assert plan.is_refused
    assert not plan.is_complete
    assert not plan.fits()
    assert "It does not fit." in str(plan)
    assert re.search(r"for v5e made no program.*\d+G.*Use more devices", plan.limits[0])
    assert memory_plan(w, "mixed_bfloat16", loss_fn, x, device="h100").fits()


def test_a_compiler_says_the_peak_on_each_of_eight(gpu: Compiler) -> None:
    """However the mesh is given: by its number, without devices, or of those that are here."""
    by_number = small("h100", devices=8)
    assert by_number.bytes_of("params") == 4 * 512 * 512 // 8
    types = (AxisType.Auto,)
    for mesh in (AbstractMesh((8,), ("data",), types), jax.make_mesh((8,), ("data",), types)):
        placed = fully_sharded(jax.ShapeDtypeStruct((512, 512), jnp.float32), mesh, "data")
        fsdp = FSDP(shardings=placed, axis="data")
        assert small("h100", fsdp=fsdp).peak == by_number.peak


def test_a_mesh_with_two_axes(gpu: Compiler) -> None:
    """What lives between steps is the compiler's, but for a flag that the step never reads."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w, x = arrays((512, 512), (64, 512))
    placed = fully_sharded(w, mesh, "data", base=P(None, "model"))
    fsdp = FSDP(shardings=placed, axis="data")
    plan = memory_plan(w, "mixed_bfloat16", loss_fn, x, fsdp=fsdp)
    assert (plan.devices, plan.bytes_of("params")) == (8, 4 * 512 * 512 // 8)
    assert plan.is_complete
    assert plan.peak < small("h100").peak / 2


def mean_over(mesh: Any) -> Any:
    """A loss that names its mesh, of a param that lies on it."""

    def loss(w: Any, x: Any) -> Any:
        local = jax.shard_map(
            lambda w: jax.lax.pmean(jnp.sum(w), "data"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
        return local(w) * jnp.mean(x)

    return loss


def test_a_loss_may_name_a_mesh_of_absent_devices_but_not_of_those_here(gpu: Compiler) -> None:
    w, x = arrays((64, 8), (64, 512))

    def planned(devices: Any) -> MemoryPlan:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
        over = NamedSharding(mesh, P("data"))
        batch = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over)
        return memory_plan(w, "float32", mean_over(mesh), batch, shardings=over, device="h100")

    assert planned(absent_devices("h100", 4)).is_complete
    with pytest.raises(ValueError, match=r"Make that mesh of jaxmp\.diagnostics\.absent_devices"):
        planned(jax.devices()[:4])


def test_a_callback_to_python_is_refused(gpu: Compiler) -> None:
    def told(w: Any, x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return loss_fn(w, x)

    w, x = arrays((512, 512), (64, 512))
    with pytest.raises(ValueError, match=r"calls back to Python, as jax\.debug\.print does"):
        memory_plan(w, "mixed_bfloat16", told, x, device="h100")
