"""Inside a `jax.shard_map`: gathers params in 16 bits, sums gradients in float32.

In a `shard_map` users write the collectives, and may sum in 16 bits by mistake. After a cast to
bfloat16, every sum over devices that differentiation adds is a bfloat16 sum. With `check_vma=False`
differentiation adds no sum at all.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from jaxmp._mesh.device_sums import (
    Axis,
    WireFormat,
    axes_size,
    bound_axes,
    device_sum,
    low_precision_sum,
    scattered_sum,
    sum_dtype,
    varying_is_tracked,
    wire_of,
)
from jaxmp._mesh.specs import check_rank, flat_specs
from jaxmp._numerics.dtypes import DType, is_inexact, is_narrow, parse_dtype
from jaxmp._numerics.rounding import open_cast
from jaxmp._numerics.tree import check_differentiable, leaf_names
from jaxmp._program.mesh_axes import named_axes


def gather_params(
    params: PyTree,
    specs: PyTree,
    axis: Axis,
    *,
    dtype: Any,
    mean: bool = True,
    comm_dtype: Any = None,
) -> PyTree:
    """Gathers float32 shards as params of the compute dtype; sums their gradients in float32.

    Does what FSDP2's `MixedPrecisionPolicy(param_dtype, reduce_dtype=float32)` does. Devices send
    16 bits. The backward pass is a float32 reduce-scatter along the gathered dimension, and a
    float32 sum for replicated params.

    Call it inside the function that is differentiated. In the body of a scan over layers or of a
    `jax.checkpoint`, only one layer is whole at a time. The differentiated function returns the
    loss of this device, a mean over its own examples. Take `lax.pmean` of the loss outside that
    function: inside it, both `mean=True` and the transpose of `pmean` under `check_vma=True` would
    divide by the number of devices, and gradients would be too small. If the loss is divided by a
    count over all devices (`lax.psum` of a mask's count), give `mean=False`.

    In a `shard_map` over only some axes of a mesh, JAX's collectives first gather an array along
    the other axes. Name all axes, or use `jit` with sharded arrays.

    Args:
      params: this device's part of each param. Leaves that are not floats are gathered without a
        cast.
      specs: the `PartitionSpec` of each param, as in the `in_specs`, or a prefix of that tree.
      axis: all mesh axes over which the loss is local. A param is gathered over the axes among them
        that its spec names; its gradient is summed over the rest. Dimensions that a spec splits
        over other axes, such as that of tensor parallelism, stay split.
      dtype: the dtype in which params are sent and returned.
      mean: whether to divide gradients by the number of devices along `axis`. True gives the
        gradient of the mean of the local losses, False the gradient of their sum.
      comm_dtype: bfloat16 sends local gradients in bfloat16, and still adds them up in float32:
        half the bytes. Local gradients have `dtype`; if that is bfloat16 too, a reduce-scatter
        loses nothing. Gradients of replicated params are rounded once after the sum.

    Returns:
      The params, whole along `axis`. Their gradients have the dtypes of `params`, and exist in any
      order in reverse mode. As with any `jax.custom_vjp`, `jax.jvp` and `jax.linearize` of a
      function that calls this raise (`jax.jvp` of its gradient works).

    Raises:
      ValueError: outside of a `shard_map` over `axis`, for specs that do not fit the params, and,
        under `check_vma=True`, for a param that varies over an axis that its spec lacks, or does
        not vary over an axis that its spec names.

    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    >>> def local_loss(w, x):
    ...     w = gather_params(w, P("data"), "data", dtype="bfloat16")
    ...     return jnp.mean((x.astype(w.dtype) @ w).astype(jnp.float32))
    >>> gradient = jax.shard_map(
    ...     jax.grad(local_loss), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    ... )
    >>> jax.jit(gradient)(jnp.ones(4), jnp.ones((2, 4))).dtype.name
    'float32'
    """
    axes = bound_axes(axis, "gather_params")
    wire = wire_of(comm_dtype, axes_size(axes))
    compute = parse_dtype(dtype)
    leaves, treedef = jax.tree.flatten(params)
    results = []
    for name, x, spec in zip(leaf_names(params), leaves, flat_specs(specs, params), strict=True):
        x = jnp.asarray(x)
        plan = _plan(name, x, spec, axes, compute)
        plan = dataclasses.replace(plan, mean=mean, wire=wire)
        results.append(_gathered_param(plan, x) if is_inexact(x) else _gather(plan, x))
    return jax.tree.unflatten(treedef, results)


def reduce_gradients(
    grads: PyTree,
    axis: Axis,
    *,
    dtype: Any = "float32",
    mean: bool = True,
    comm_dtype: Any = None,
) -> PyTree:
    """Sums the gradients of local losses over the devices, in float32.

    For params that every device holds whole. (Gradients of params from `gather_params` are summed
    already.) `lax.pmean` would sum bfloat16 gradients in bfloat16: same-sign gradients of 1,024
    devices lose 64 % on a ring.

    With `check_vma=True`, `jax.grad` itself sums the gradient of a param that does not vary over
    the axis, in the dtype to which the param is cast. Differentiate by
    `lax.pcast(params, axis, to="varying")` to get local gradients.

    Args:
      grads: gradients of this device's loss, a mean over its own examples.
      axis: the mesh axes over which the gradients are local.
      dtype: the dtype in which to add them up. "float16" divides before the cast and after the
        sum by the factors of PyTorch's FSDP2. Gradients wider than float32 are summed in their own
        dtype.
      mean: whether to divide by the number of devices.
      comm_dtype: "bfloat16" sends gradients in bfloat16, and adds them up in float32: an
        all-to-all, a local sum and an all-gather, with half the bytes of a float32 sum. Gradients
        of other dtypes are rounded once before the sum, and the sums once after it. "float16" does
        the same, and divides before the cast; beware that unscaled gradients vanish in it.

    Returns:
      The gradients, float32 (or wider), the same on all devices of the axis.

    Raises:
      ValueError: outside of a `shard_map` over `axis`; or, under `check_vma=True` only, if a
        gradient is the same on all devices already: a second sum would multiply it by their number.
      TypeError: for a leaf that is not a float.

    >>> jax.vmap(lambda g: reduce_gradients(g, "data"), axis_name="data")(jnp.arange(4.0))
    Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    axes = bound_axes(axis, "reduce_gradients")
    check_differentiable(grads, "gradients")
    total, world = sum_dtype(dtype), axes_size(axes)
    wire = wire_of(comm_dtype, world)
    if wire is not None and is_narrow(total):
        raise ValueError(
            f"comm_dtype={wire.dtype} is for sums in float32, got dtype={total}. Leave dtype out"
        )
    _check_local(grads, axes)
    count = world if mean else 1

    def reduce(x: Any) -> Array:
        x = jnp.asarray(x)
        if is_narrow(total) and x.dtype.itemsize <= 4:
            return low_precision_sum(x, axes, WireFormat.of(total, world), count)
        return device_sum(x, axes, wire, count)

    return jax.tree.map(reduce, grads)


@dataclasses.dataclass(frozen=True)
class _ParamPlan:
    """The plan for gathering one param and reducing its gradient.

    Attributes:
      gathers: the dimensions to gather, each with its mesh axes.
      sums: the axes of the loss over which the param is replicated.
      tracked: whether JAX tracks over which axes arrays vary.
      primal: the dtype of the param.
      compute: the dtype in which it is gathered.
      world: the number of devices along the axes of the loss.
      mean: whether to divide gradients by `world`.
      wire: how gradients are sent.
    """

    gathers: tuple[tuple[int, tuple[str, ...]], ...]
    sums: tuple[str, ...]
    tracked: bool
    primal: DType
    compute: DType
    world: int
    mean: bool = True
    wire: WireFormat | None = None


def _gather(plan: _ParamPlan, x: Array) -> Array:
    # The backward pass sums the gradients of replicas. JAX would do so too if they did not vary.
    if plan.sums and plan.tracked:
        x = lax.pcast(x, plan.sums, to="varying")
    x = x.astype(plan.compute)  # before the all-gather, so that devices send 16 bits
    for dim, axes in plan.gathers:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_param(plan: _ParamPlan, x: Array) -> Array:
    return _gather(plan, x)


def _gather_fwd(plan: _ParamPlan, x: Array) -> tuple[Array, None]:
    return _gather(plan, x), None


def _gather_bwd(plan: _ParamPlan, _: None, cotangent: Array) -> tuple[Array]:
    # The transpose that JAX derives would sum in the compute dtype, and not at all for replicated
    # params under `check_vma=False`.
    count = plan.world if plan.mean else 1
    total = cotangent
    for dim, axes in reversed(plan.gathers):
        total = scattered_sum(total, axes, dim, plan.wire)
    total = device_sum(total, plan.sums, plan.wire, count) if plan.sums else total / count
    return (open_cast(total, plan.primal),)


_gathered_param.defvjp(_gather_fwd, _gather_bwd)


def _plan(name: str, x: Array, spec: Any, axes: tuple[str, ...], compute: DType) -> _ParamPlan:
    check_rank(name, x.ndim, spec)
    gathers = []
    for dim, entry in enumerate(spec):
        names = named_axes(entry)
        # Other axes, such as that of tensor parallelism, stay split. A gather along the last axes
        # of a dimension joins neighboring shards.
        ours = tuple(a for a in names if a in axes)
        if ours and ours != names[-len(ours) :]:
            raise ValueError(
                f"params leaf {name!r} cannot be gathered along {ours}: in its {spec} these are "
                f"not the last axes of dimension {dim}, so that shards are not contiguous. Put "
                "the axes of FSDP behind those of tensor parallelism"
            )
        if ours:
            gathers.append((dim, ours))
    gather_axes = [a for _, names in gathers for a in names]
    sums = tuple(a for a in axes if a not in gather_axes)
    tracked = varying_is_tracked(axes)
    if tracked:
        _check_varying(name, x, spec, gather_axes, sums)
    # Tables of integers are gathered as they are.
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return _ParamPlan(
        gathers=tuple(gathers),
        sums=sums,
        tracked=tracked,
        primal=x.dtype,
        compute=compute if floating else x.dtype,
        world=axes_size(axes),
    )


def _check_varying(
    name: str, x: Array, spec: Any, gathered: Sequence[str], sums: Sequence[str]
) -> None:
    varying = jax.typeof(x).mat.varying
    if same := [a for a in gathered if a not in varying]:
        raise ValueError(
            f"params leaf {name!r} is the same on all devices of {same}, but its {spec} says that "
            "they hold shards. Give shard_map and gather_params the same specs"
        )
    if different := [a for a in sums if a in varying]:
        raise ValueError(
            f"params leaf {name!r} differs between the devices of {different}, but its {spec} "
            "says that it is replicated. If shard_map got another spec, give the same here; if it "
            "went through lax.pcast, leave that out: gather_params sums its gradient"
        )


def _check_local(grads: PyTree, axes: tuple[str, ...]) -> None:
    if not varying_is_tracked(axes):  # with check_vma=False no type says what was summed
        return
    # A second sum would multiply gradients that are summed already by the number of devices.
    for name, x in zip(leaf_names(grads), jax.tree.leaves(grads), strict=True):
        if same := [a for a in axes if a not in jax.typeof(x).mat.varying]:
            raise ValueError(
                f"gradients leaf {name!r} is the same on all devices of {same}: it was summed "
                "already, or is no gradient of a local loss, and a second sum would multiply it. "
                "jax.grad sums the gradients of params that do not vary over an axis, in the dtype "
                "to which the loss casts them. Differentiate by "
                "lax.pcast(params, axis, to='varying'), or use gather_params in the loss"
            )
