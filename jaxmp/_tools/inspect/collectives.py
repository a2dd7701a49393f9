"""Reports the data and the mesh axes of the collectives of a compiled program."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxmp._program.mesh_axes import check_mesh
from jaxmp._tools.hlo.collectives import CompiledProgram, Transfer, read_program
from jaxmp._tools.hlo.products import HAS_OPERANDS, NOT_KNOWN, HloCodeProduct
from jaxmp._tools.hlo.replica_groups import Groups
from jaxmp._tools.inspect.collective_report import Collectives, CompiledCollective, CompiledProduct
from jaxmp._tools.inspect.compiled import Source, source_of
from jaxmp._tools.inspect.lines import direction, line_of_frames, path_of_operation
from jaxmp._tools.inspect.rows import grouped


def collectives(program: Any, *args: Any, mesh: Any = None, **kwargs: Any) -> Collectives:
    """Reports the data and the mesh axes of the collectives of a compiled program.

    Under `jit` with sharded arrays, the compiler's partitioner inserts the collectives, so no jaxpr
    shows them. With bfloat16 compute, it also sums gradients over devices in bfloat16, with an
    error that grows with the number of devices. `collectives` compiles the program, without
    running it, and reads the result.

    Args:
      program: a function, jitted or not; the result of `lower` or `compile` of a jitted function;
        or the text of a compiled program.
      *args: the arguments of a function. Arrays may be `jax.ShapeDtypeStruct` with a sharding.
      mesh: the mesh whose axes to report; by default the mesh of the arguments and results.
      **kwargs: keyword arguments of the function.

    Returns:
      The report: print it, iterate its rows, or ask it for `bytes`. On TPUs and GPUs it is about
      the compiled program. XLA widens 16-bit collectives on CPUs, so there the report is about the
      program right after partitioning, in which reduce-scatters are still all-reduces.

    Raises:
      TypeError: if `program` is none of these, or `mesh` is not a mesh.
      ValueError: for a program that was compiled for CPUs, or for a mesh that does not fit it.

    >>> import jax.numpy as jnp
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> devices = jax.device_count()
    >>> mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    >>> def array(*shape, spec):
    ...     sharding = NamedSharding(mesh, spec)
    ...     return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)))
    >>> args = array(128, 64, spec=P()), array(32, 128, spec=P("data"))
    >>> report = collectives(jax.grad(loss), *args)
    >>> {(row.kind, row.reducer, row.dtype, row.axes) for row in report} <= {
    ...     ("all-reduce", "add", "bfloat16", ("data",))
    ... }
    True
    >>> report.bytes(dtype="bfloat16", reducer="add") == (2 * 128 * 64 if devices > 1 else 0)
    True
    """
    source = source_of(program, args, kwargs)
    hlo = read_program(source.text)
    mesh, reason = _fitting_mesh(mesh, source, hlo)
    places = _Places(mesh, hlo)
    rows = [_row(transfer, places) for transfer in hlo.transfers]
    return Collectives(
        rows=tuple(sorted(rows, key=lambda row: -row.bytes)),
        origin=source.origin,
        devices=places.slices * hlo.devices,
        mesh_axes=tuple(mesh.shape.items()) if mesh is not None else (),
        no_mesh=reason,
        unseen=_unseen_parts(source, hlo),
        float8_products=_product_rows(hlo.float8),
    )


def _fitting_mesh(mesh: Any, source: Source, hlo: CompiledProgram) -> tuple[Any, str]:
    """Returns the mesh of a program, or None and the reason; `mesh` is the user's, or None."""
    fitting = [own for own in source.meshes if _fits(own, hlo)]
    if mesh is not None:
        check_mesh(mesh)
        if not _fits(mesh, hlo) and hlo.slices == 1:
            raise ValueError(
                f"the mesh has {mesh.size} devices, the program runs on {hlo.devices}: give the "
                "mesh that its arguments are sharded over"
            )
        if not _fits(mesh, hlo):
            raise ValueError(
                f"the program runs on {hlo.slices} TPU slices of {hlo.devices} devices, which "
                f"{type(mesh).__name__}({dict(mesh.shape)}) does not have: give the "
                "jax.sharding.Mesh that its arguments are sharded over, since an AbstractMesh does "
                "not say which slice a device is in"
            )
        # Groups of a program are positions in its own mesh: in another order axes would be wrong.
        orders = [list(own.devices.flat) for own in fitting]
        is_concrete = isinstance(mesh, jax.sharding.Mesh)
        if is_concrete and orders and list(mesh.devices.flat) not in orders:
            raise ValueError(
                "the mesh has other devices than that of the program's arguments, or the same in "
                "another order"
            )
        return mesh, ""
    # The text of a program has no arrays: then the mesh that is set counts.
    if not fitting:
        current = jax.sharding.get_mesh()
        if not current.empty and _fits(current, hlo):
            return current, ""
        return None, "no argument and no result is sharded over a mesh of all devices"
    if len(fitting) > 1:
        return None, "arguments and results are sharded over different meshes"
    return fitting[0], ""


def _slices(mesh: Any, hlo: CompiledProgram) -> list[list[tuple[int, int]]]:
    """Returns the devices of each TPU slice: their positions in the mesh, and their ids."""
    positions = range(mesh.size)
    # An AbstractMesh has no devices, so that it counts as one slice.
    if mesh.size == hlo.devices or not isinstance(mesh, jax.sharding.Mesh):
        return [[(position, position) for position in positions]]
    slices: dict[int, list[tuple[int, int]]] = {}
    for position, device in zip(positions, mesh.devices.flat, strict=True):
        slices.setdefault(getattr(device, "slice_index", 0), []).append((position, device.id))
    return [slices[index] for index in sorted(slices)]


def _fits(mesh: Any, hlo: CompiledProgram) -> bool:
    """Whether a mesh has the devices of a program, whose text is that of one TPU slice."""
    slices = _slices(mesh, hlo)
    return len(slices) >= hlo.slices and all(len(devices) == hlo.devices for devices in slices)


class _Places:
    """Where the devices of a program are in a mesh, and along which axes groups of them extend.

    Attributes:
      slices: how many TPU slices the program runs on.
    """

    def __init__(self, mesh: Any, hlo: CompiledProgram) -> None:
        self._names = tuple(mesh.axis_names) if mesh is not None else None
        self._sizes = tuple(mesh.shape.values()) if mesh is not None else ()
        # Without a mesh, slice after slice.
        starts = range(0, hlo.slices * hlo.devices, hlo.devices)
        unknown = [[(start + i, i) for i in range(hlo.devices)] for start in starts]
        slices = _slices(mesh, hlo) if mesh is not None else unknown
        self.slices, self._devices = len(slices), hlo.devices
        # Groups within a slice count devices as the mesh has them; those between slices by id.
        self._assigned = [position for devices in slices for position, _ in devices]
        by_id = [sorted(devices, key=lambda device: device[1]) for devices in slices]
        self._by_id = [position for devices in by_id for position, _ in devices]
        # Thousands of transfers share a few groups.
        self._axes: dict[Groups, tuple[str, ...]] = {}

    def of(self, transfer: Transfer) -> Groups:
        """Returns the groups of a transfer, in all slices, as positions in the mesh."""
        starts = [0] if transfer.between_slices else [n * self._devices for n in range(self.slices)]
        places = self._by_id if transfer.between_slices else self._assigned
        return tuple(
            tuple(places[start + i] for i in group) for start in starts for group in transfer.groups
        )

    def axes(self, groups: Groups) -> tuple[str, ...] | None:
        """Returns the mesh axes along which groups extend; None without a mesh."""
        if self._names is None:
            return None
        # A group extends along an axis if the positions of its devices differ there.
        if groups not in self._axes:
            moves = np.zeros(len(self._sizes), dtype=bool)
            for group in groups:
                places = np.stack(np.unravel_index(np.asarray(group, dtype=int), self._sizes))
                moves |= np.any(places != places[:, :1], axis=1)
            pairs = zip(self._names, moves, strict=True)
            self._axes[groups] = tuple(name for name, is_along in pairs if is_along)
        return self._axes[groups]


def _row(transfer: Transfer, places: _Places) -> CompiledCollective:
    groups = places.of(transfer)
    return CompiledCollective(
        kind=transfer.kind,
        dtype=transfer.dtype,
        reducer=transfer.reducer,
        axes=places.axes(groups),
        group_size=max(map(len, groups), default=1),
        between_slices=transfer.between_slices,
        line=line_of_frames(transfer.frames),
        path=path_of_operation(transfer.op_name),
        direction=direction(transfer.op_name),
        op_name=transfer.op_name,
        arrays=transfer.arrays,
        elements=transfer.elements,
        size=transfer.bytes,
        runs=transfer.runs,
        bytes=transfer.bytes * transfer.runs,
        groups=groups,
    )


def _product_rows(products: Iterable[HloCodeProduct]) -> tuple[CompiledProduct, ...]:
    def key(product: HloCodeProduct) -> tuple[Any, ...]:
        name = product.op_name
        where = line_of_frames(product.frames), path_of_operation(name), direction(name)
        return product.operands, product.result, product.ran, *where

    rows = [
        (*shared, len(group), sum(product.runs for product in group))
        for shared, group in grouped(products, key).items()
    ]
    return tuple(CompiledProduct(*row) for row in rows)


def _unseen_parts(source: Source, hlo: CompiledProgram) -> tuple[str, ...]:
    sentences = []
    if source.origin == "program after partitioning":
        sentences.append(
            "What the compiler does after partitioning: it may combine, drop or split collectives, "
            "and makes reduce-scatters of all-reduces. That for TPUs may sum in bfloat16 what is "
            "float32 here; a program that is compiled for TPUs shows it, and needs none "
            "(docs/audit.md)."
        )
    if hlo.unknown_loops:
        sentences.append(
            f"while loops with collectives ({hlo.unknown_loops}): how often they run is not "
            "known; each is counted once."
        )
    if hlo.conditionals:
        sentences.append(
            f"conditionals with collectives ({hlo.conditionals}): every branch is counted."
        )
    if hlo.sends:
        sentences.append(f"sends to other devices ({hlo.sends}): what they carry is not listed.")
    runs = [product.ran for product in hlo.float8]
    if fused := runs.count(NOT_KNOWN):
        sentences.append(
            f"fusions with products of 8-bit operands ({fused}): whether their kernels multiply "
            "8 bits or widen them first is not in the program."
        )
    if unfused := sum(ran.endswith(HAS_OPERANDS) for ran in runs):
        sentences.append(
            f"products of 8-bit operands ({unfused}): whether they are multiplied in 8 bits is the "
            "device's choice. Inside of the product, TPUs before 7x widen float8, and TPU 7x "
            "widens int8."
        )
    # Always: a kernel may send data by itself, and its text is not part of the program.
    sentences.append("What kernels and custom calls send by themselves.")
    return tuple(sentences)
