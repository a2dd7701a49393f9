"""Programs over several TPU slices: all that crosses them is seen, along the right mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP
from tests.aot.conftest import Compiler
from tests.support.collective_programs import BF16, F32, array

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def hybrid(tpus: Compiler, within: tuple[int, ...], slices: tuple[int, ...], *names: str) -> Mesh:
    """A mesh of some slices; along each axis so many devices of a slice, and so many slices."""
    devices = mesh_utils.create_hybrid_device_mesh(within, slices, devices=tpus.devices)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def every_kind(axis: str, size: int) -> Any:
    """One collective of each kind; each device has 64 x 1024."""
    shifted = [(i, (i + 1) % size) for i in range(size)]

    def body(x: Any) -> Any:
        return (
            lax.psum(x, axis),
            lax.pmax(x.astype(F32), axis),
            lax.psum_scatter(x.astype(F32), axis, tiled=True),
            lax.all_gather(x, axis, tiled=True),
            lax.all_to_all(x, axis, 0, 1, tiled=True),
            lax.ppermute(x.astype(jnp.int32), axis, shifted),
        )

    return body


@pytest.mark.parametrize("slices", [2, 4])
def test_every_kind_between_slices(request: pytest.FixtureRequest, slices: int) -> None:
    """Along an axis of slices each kind carries what it does along one of devices, and no more."""
    compiler = request.getfixturevalue({2: "two_slices", 4: "four_slices"}[slices])
    mesh = hybrid(compiler, (1, 8), (slices, 1), "replica", "data")
    both = P(("replica", "data"))
    body = every_kind("replica", slices)
    run = jax.shard_map(body, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
    x = array(mesh, (64 * mesh.size, 1024), ("replica", "data"), dtype=BF16)
    report = jaxmp.sharding.collectives(compiler.lower(run, x).compile(), mesh=mesh)
    assert report.devices == mesh.size
    own = 64 * 1024
    assert {(r.kind, r.reducer, r.dtype): r.bytes for r in report.select(between_slices=True)} == {
        ("all-reduce", "add", "bfloat16"): 2 * own,
        ("all-reduce", "max", "float32"): 4 * own,
        ("reduce-scatter", "add", "float32"): 4 * own,
        ("all-gather", "", "bfloat16"): 2 * own * slices,
        ("all-to-all", "", "bfloat16"): 2 * own,
        ("collective-permute", "", "int32"): 4 * own,
    }
    assert {row.axes for row in report} == {("replica",)}
    assert report.bytes(axis="replica") == report.bytes(between_slices=True) == report.bytes()


def test_axes_that_mix_slices_and_devices(four_slices: Compiler) -> None:
    """Of an axis that goes over slices and within them, each part is told from the other axis."""
    mesh = hybrid(four_slices, (4, 2), (1, 4), "model", "data")

    def body(x: Any) -> Any:
        return lax.psum(lax.psum(x, "data"), "model")

    spec = P(("model", "data"))
    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = array(mesh, (64 * mesh.size, 1024), ("model", "data"), dtype=BF16)
    report = jaxmp.sharding.collectives(four_slices.lower(run, x).compile())
    assert {(row.axes, row.between_slices) for row in report} == {
        (("data",), True),
        (("data",), False),
        (("model",), False),
    }
    (between,) = report.select("all-reduce", between_slices=True)
    assert (between.group_size, between.reducer, between.dtype) == (4, "add", "bfloat16")
    # Each group is one device of each slice, in places of the mesh that differ by slices alone.
    slice_of = [device.slice_index for device in mesh.devices.flat]
    assert sorted(i for group in between.groups for i in group) == list(range(mesh.size))
    assert all(sorted(slice_of[i] for i in group) == [0, 1, 2, 3] for group in between.groups)
    for row in report.select(between_slices=False):
        assert all(len({slice_of[i] for i in group}) == 1 for group in row.groups)


def test_a_narrow_sum_between_slices_is_seen(two_slices: Compiler) -> None:
    """Plain JAX sums gradients between slices in bfloat16, jaxmp in float32."""
    mesh = hybrid(two_slices, (1, 8), (2, 1), "replica", "data")
    params = {name: array(mesh, (1024, 1024), None, "data") for name in ("up", "down")}
    x = array(mesh, (256, 1024), ("replica", "data"), dtype=BF16)

    def loss(params: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["up"].astype(BF16)) @ params["down"].astype(BF16)
        return jnp.mean(h.astype(F32) ** 2)

    shardings = jax.tree.map(lambda p: p.sharding, params)
    ours = jaxmp.value_and_grad(loss, reduce_dtype="float32", fsdp=FSDP(shardings=shardings))
    plain, wide = (
        two_slices.lower(fun, params, x, out_shardings=(None, shardings)).compile()
        for fun in (jax.value_and_grad(loss), ours)
    )
    with pytest.raises(jaxmp.AuditError, match="bfloat16  all-reduce over replica"):
        jaxmp.assert_reduced_in(plain, F32, mesh=mesh, axis="replica")
    jaxmp.assert_reduced_in(wide, F32, mesh=mesh, axis=("replica", "data"))
    part = 2 * 1024 * 1024 // 8
    between = jaxmp.sharding.collectives(wide).select(between_slices=True)
    sums = [row.bytes for row in between if row.elements > 128]  # without the loss
    assert sum(sums) == 4 * part
    assert jaxmp.sharding.collectives(plain).bytes(dtype=BF16, between_slices=True) == 2 * part
    with pytest.raises(ValueError, match="AbstractMesh does not say which slice a device is in"):
        jaxmp.sharding.collectives(wide, mesh=mesh.abstract_mesh)


def test_lookups_between_slices_round_nothing(four_slices: Compiler) -> None:
    """A table that is split over slices too: one device has the row, the others zeros."""
    mesh = hybrid(four_slices, (1, 8), (4, 1), "replica", "data")
    table = array(mesh, (1024, 256), ("replica", "data"), dtype=BF16)
    tokens = array(mesh, (64,), dtype=jnp.int32)
    whole = jax.sharding.NamedSharding(mesh, P())
    run = four_slices.lower(lambda t, i: t[i], table, tokens, out_shardings=whole)
    report = jaxmp.sharding.collectives(run.compile())
    assert {row.reducer for row in report.select(("all-reduce", "reduce-scatter"))} == {"select"}
    assert report.bytes("all-reduce", BF16, between_slices=True) == 64 * 256 * 2 // 8
