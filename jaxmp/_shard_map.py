"""Inside a `jax.shard_map`: params gathered in 16 bits, gradients summed in float32.

In a `shard_map` the collectives are the user's, and so is the mistake to sum in 16 bits: a cast
to bfloat16 turns every sum over devices that differentiation puts behind it into one of bfloat16
numbers, and with `check_vma=False` there is no sum at all.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from jaxmp import _tree
from jaxmp._device_sums import (
    Axis,
    Wire,
    axes_size,
    bound_axes,
    device_sum,
    low_precision_sum,
    scattered_sum,
    sum_dtype,
    varying_is_tracked,
    wire_of,
)
from jaxmp._dtypes import DType, is_inexact, is_narrow, parse_dtype
from jaxmp._specs import check_rank, flat_specs, named_axes
from jaxmp._tree import check_differentiable, leaf_names


def gather_params(
    params: PyTree,
    specs: PyTree,
    axis: Axis,
    *,
    dtype: Any,
    mean: bool = True,
    comm_dtype: Any = None,
) -> PyTree:
    """Whole params in the compute dtype from float32 shards; their gradients summed in float32.

    What FSDP2's `MixedPrecisionPolicy(param_dtype, reduce_dtype=float32)` does. The cast comes
    before the all-gather, so that 16 bits travel. Its transpose is written here, since the one
    that JAX derives would sum in the compute dtype, and for replicated params under
    `check_vma=False` would not sum at all: a float32 reduce-scatter along the dimension that was
    gathered, a float32 sum for what is replicated.

    Call it inside of the function that is differentiated: in the body of a scan over layers or of
    a `jax.checkpoint`, and only one layer is whole at a time. That function returns the loss of
    this device, a mean over its own examples. Take `lax.pmean` of the loss outside of it: its
    transpose divides by the devices under `check_vma=True`, and so does `mean=True`, so that
    gradients would be too small. A loss divided by a count over all devices (`lax.psum` of that of
    a mask) wants `mean=False`.

    In a `shard_map` over only some axes of a mesh, JAX's collectives first make an array whole
    along the others: name all axes, or use `jit` with sharded arrays.

    Args:
      params: this device's part of each param. Leaves that are no floats are gathered uncast.
      specs: the `PartitionSpec` of each param, as in the `in_specs`, or a prefix of that tree.
      axis: the mesh axes over which the loss is local, all of them. Params are gathered over
        those that their spec names, and their gradients summed over the others. Other axes in a
        spec, such as that of tensor parallelism, stay as they are.
      dtype: the dtype in which params travel and come back.
      mean: whether gradients are divided by the number of devices along `axis`: the gradient of
        the mean of the local losses. Without it, of their sum.
      comm_dtype: bfloat16 sends local gradients in it, and still adds them up in float32: half
        the bytes. They are in `dtype` anyway, so that a reduce-scatter loses nothing if that is
        the same; sums of replicated params are rounded once on their way back.

    Returns:
      The params without shards along `axis`. They have gradients in the dtypes of `params`, of
      any order in reverse mode; as for all functions with a transpose of their own, `jax.jvp` and
      `jax.linearize` of a function with this inside raise (`jax.jvp` of its gradient works).

    Raises:
      ValueError: outside of a `shard_map` over `axis`, for specs that do not fit the params, and,
        under `check_vma=True`, for a param that varies over an axis that its spec lacks, or does
        not vary over one that it names.

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
    gathered = []
    for name, x, spec in zip(leaf_names(params), leaves, flat_specs(specs, params), strict=True):
        x = jnp.asarray(x)
        plan = _plan(name, x, spec, axes, compute)
        plan = dataclasses.replace(plan, mean=mean, wire=wire)
        gathered.append(_gather(plan, x) if is_inexact(x) else _gathered(plan, x))
    return jax.tree.unflatten(treedef, gathered)


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
      axis: the mesh axes over which they are local.
      dtype: the dtype in which to add them up. "float16" divides before the cast and after the
        sum by the factors of PyTorch's FSDP2. Wider gradients than float32 are summed as they are.
      mean: whether to divide by the number of devices.
      comm_dtype: "bfloat16" sends gradients in it, and adds them up in float32: an all-to-all, a
        local sum and an all-gather, of half the bytes of a float32 sum. The gradients are rounded
        once before, if they are not in it already, and the sums once. "float16" likewise, divided
        before the cast; beware that unscaled gradients vanish in it.

    Returns:
      The gradients, float32 (or wider), the same on all devices of the axis.

    Raises:
      ValueError: outside of a `shard_map` over `axis`; or if a gradient is the same on all
        devices already, which a second sum would multiply by their number (seen only under
        `check_vma=True`).
      TypeError: for a leaf that is no float.

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
    over = world if mean else 1

    def reduce(x: Any) -> Array:
        x = jnp.asarray(x)
        if is_narrow(total) and x.dtype.itemsize <= 4:
            return low_precision_sum(x, axes, Wire.of(total, world), over)
        return device_sum(x, axes, wire, over)

    return jax.tree.map(reduce, grads)


def all_finite(tree: PyTree, axis: Axis | None = None) -> Bool[Array, ""]:
    """Whether all numbers on all devices are finite; `jaxmp.all_finite` sees only its own shard.

    With a local flag, one device skips a step that the others take, and nothing raises: their
    params and loss scales go apart for ever.

    Args:
      tree: any pytree of local arrays.
      axis: the mesh axes over which to agree; by default all those of the `shard_map`, which is
        what a flag needs that decides over a step.

    Returns:
      A boolean scalar, the same on all of these devices.

    Raises:
      ValueError: outside of a `shard_map`.

    >>> x = jnp.array([1.0, jnp.nan])
    >>> jax.vmap(lambda x: all_finite(x, "data"), axis_name="data")(x)
    Array([False, False], dtype=bool)
    """
    if axis is None:
        axis = jax.sharding.get_abstract_mesh().manual_axes
    axes = bound_axes(axis, "all_finite")
    return lax.pmin(_tree.all_finite(tree), axes)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What becomes of one param.

    Attributes:
      gathers: the dimensions to gather, each with its mesh axes.
      sums: the axes of the loss over which the param is replicated.
      tracked: whether JAX keeps track of what varies over which axes.
      primal: the dtype of the param.
      compute: the dtype in which it is gathered.
      world: the number of devices of the loss.
      mean: whether to divide by that.
      wire: how gradients travel.
    """

    gathers: tuple[tuple[int, tuple[str, ...]], ...]
    sums: tuple[str, ...]
    tracked: bool
    primal: DType
    compute: DType
    world: int
    mean: bool = True
    wire: Wire | None = None


def _gathered(plan: _Plan, x: Array) -> Array:
    if plan.sums and plan.tracked:
        x = lax.pcast(x, plan.sums, to="varying")
    x = x.astype(plan.compute)
    for dim, axes in plan.gathers:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(plan: _Plan, x: Array) -> Array:
    return _gathered(plan, x)


def _gather_fwd(plan: _Plan, x: Array) -> tuple[Array, None]:
    return _gathered(plan, x), None


def _gather_bwd(plan: _Plan, _: None, cotangent: Array) -> tuple[Array]:
    over = plan.world if plan.mean else 1
    total = cotangent
    for dim, axes in reversed(plan.gathers):
        total = scattered_sum(total, axes, dim, plan.wire)
    total = device_sum(total, plan.sums, plan.wire, over) if plan.sums else total / over
    return (total.astype(plan.primal),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def _plan(name: str, x: Array, spec: Any, axes: tuple[str, ...], compute: DType) -> _Plan:
    check_rank(name, x.ndim, spec)
    gathers = []
    for dim, entry in enumerate(spec):
        named = named_axes(entry)
        ours = tuple(a for a in named if a in axes)
        if ours and ours != named[-len(ours) :]:
            raise ValueError(
                f"params leaf {name!r} cannot be gathered along {ours}: in its {spec} these are "
                f"not the last axes of dimension {dim}, so that shards are not contiguous. Put "
                "the axes of FSDP behind those of tensor parallelism"
            )
        if ours:
            gathers.append((dim, ours))
    gathered = [a for _, named in gathers for a in named]
    sums = tuple(a for a in axes if a not in gathered)
    tracked = varying_is_tracked(axes)
    if tracked:
        _check_varying(name, x, spec, gathered, sums)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return _Plan(
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
    if not varying_is_tracked(axes):
        return
    for name, x in zip(leaf_names(grads), jax.tree.leaves(grads), strict=True):
        if done := [a for a in axes if a not in jax.typeof(x).mat.varying]:
            raise ValueError(
                f"gradients leaf {name!r} is the same on all devices of {done}: it was summed "
                "already, or is no gradient of a local loss, and a second sum would multiply it. "
                "jax.grad sums the gradients of params that do not vary over an axis, in the dtype "
                "to which the loss casts them. Differentiate by "
                "lax.pcast(params, axis, to='varying'), or use gather_params in the loss"
            )
