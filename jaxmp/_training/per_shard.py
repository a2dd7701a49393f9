"""Computes the gradients of each device's part of the batch, and sums them in float32.

Under `jit` a gradient is that of the whole batch, and the partitioner adds up its parts in the
dtype of the product. Here the batch gets a leading axis of parts, sharded over the devices, and a
`vmap` over it shows what each device holds. So jaxmp decides how to sum the parts: the partitioner
turns a sum over this axis into a collective, in the dtype of the sum.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array, PyTree

from jaxmp._mesh.device_sums import Axis, WireFormat, wire_of
from jaxmp._mesh.specs import axes_of_spec, check_rank, flat_specs, without_axes
from jaxmp._numerics.dtypes import DType, parse_dtype
from jaxmp._numerics.tree import cast_floating, check_differentiable, leaf_names, strong, widen
from jaxmp._program.explicit_axes import Axes
from jaxmp._program.mesh_axes import automatic, check_mesh, explicit_mesh, named_axes
from jaxmp._training.gradient_options import GradientOptions, LossScaleLike
from jaxmp._training.gradients import scaled_evaluation
from jaxmp._training.microbatch import Evaluation, examples_of, is_single_key

_ANY = jax.P.UNCONSTRAINED


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices over which a batch is split.

    Attributes:
      mesh: their mesh.
      axes: the mesh axes over which the batch is split.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of parts."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    def check_auto(self) -> None:
        """Raises in a `shard_map`, where the axes do not belong to the partitioner."""
        if manual := set(self.axes) & set(jax.sharding.get_abstract_mesh().manual_axes):
            raise ValueError(
                f"per_shard is for jit with sharded arrays, but this is inside of a shard_map over "
                f"{sorted(manual)}, where each device has its own part already. Use "
                "jaxmp.sharding.gather_params or reduce_gradients here"
            )

    def constrain(self, x: Array, entries: Sequence[Any]) -> Array:
        """Constrains the sharding of an array; leaves trailing dimensions to the partitioner."""
        spec = jax.P(*entries, *[_ANY] * (x.ndim - len(entries)))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def vmap(self, local: Callable[..., Any], in_axes: Sequence[int | None]) -> Callable[..., Any]:
        """Maps a function over all parts, each on its devices."""
        # A loss may use `lax.pmean(count, axis)`: a single axis has its name inside.
        mapped = functools.partial(jax.vmap, in_axes=tuple(in_axes), spmd_axis_name=self.axes)
        return mapped(local, axis_name=self.axes[0]) if len(self.axes) == 1 else mapped(local)

    def split(self, batch: dict[int, PyTree], whole: dict[str, Any]) -> dict[int, PyTree]:
        """Gives arguments a leading axis of parts; each device keeps the examples it has."""
        name, examples = examples_of(batch, whole, "over the devices")
        if examples % self.size:
            raise ValueError(
                f"batch leaf {name!r} has {examples} examples, which the {self.size} devices along "
                f"{self.axes} do not divide. Use a batch size that is a multiple of {self.size}, "
                "or leave its argument out of batch_argnums if it is no part of the batch"
            )

        def split_leaf(x: Any) -> Array:
            if is_single_key(x):  # each part has its own dropout
                return self.constrain(jax.random.split(x, self.size), [self.axes])
            shape = jnp.shape(x)
            parts = jnp.reshape(x, (self.size, shape[0] // self.size, *shape[1:]))
            return self.constrain(parts, [self.axes])

        return {i: jax.tree.map(split_leaf, tree) for i, tree in batch.items()}

    def gather(self, x: Any, spec: Any) -> Array:
        """Gathers a param along the axes of the batch."""
        if spec is None or not axes_of_spec(spec) & set(self.axes):
            return x
        entries = _pad_spec(spec, jnp.ndim(x))
        # Constrained before and after, or the preceding cast would move behind the gather.
        return self.constrain(self.constrain(x, entries), without_axes(entries, self.axes))

    def sum(self, parts: Array, spec: Any, wire: WireFormat | None) -> Array:
        """Sums a gradient over the leading axis of parts, in float32 or wider."""
        shape = parts.shape[1:]
        spec_entries = None if spec is None else _pad_spec(spec, len(shape))
        local = without_axes(spec_entries or [_ANY] * len(shape), self.axes)
        low = wire is not None and parts.dtype.itemsize <= 4
        dim = _dimension_to_split(shape, spec_entries, self) if low else None
        if wire is None or dim is None:
            total = jnp.sum(self.constrain(widen(parts), [self.axes, *local]), 0)
            return total if spec_entries is None else self.constrain(total, spec_entries)
        # Devices may add up 16-bit numbers in 16 bits. So each gets one piece of all gradients,
        # adds up in float32, and sends the sum.
        missing = [a for a in self.axes if a not in axes_of_spec(spec_entries or ())]
        split = list(spec_entries or [None] * len(shape))
        split[dim] = (*named_axes(split[dim]), *missing)
        if excess := -shape[dim] % self.size:
            parts = jnp.pad(
                parts, [(0, 0)] * (1 + dim) + [(0, excess)] + [(0, 0)] * (len(shape) - dim - 1)
            )
        # From the whole gradient of one part to one piece of all gradients: an all-to-all.
        sent = self.constrain(wire.send(parts), [self.axes, *local])
        total = jnp.sum(wire.receive(self.constrain(sent, [None, *split])), 0)
        if not missing:
            return self.constrain(total, split)
        sent = self.constrain(wire.send(total), split)
        back = self.constrain(sent, spec_entries or [None] * len(shape))
        return lax.slice_in_dim(wire.receive(back), 0, shape[dim], axis=dim)


def _dimension_to_split(
    shape: tuple[int, ...], end: list[Any] | None, shards: Shards
) -> int | None:
    """Returns the dimension along which to split a sum over the devices; None for no split."""
    if math.prod(shape) < shards.size:
        return None
    entries = end or [None] * len(shape)
    for dim, entry in enumerate(entries):
        if set(named_axes(entry)) & set(shards.axes):
            return dim
    free = [dim for dim, entry in enumerate(entries) if not named_axes(entry)]
    even = [dim for dim in free if shape[dim] % shards.size == 0]
    return max(even or free, key=lambda dim: shape[dim], default=None)


def _pad_spec(spec: Any, ndim: int) -> list[Any]:
    return [*spec, *[None] * (ndim - len(spec))]


def shards_of(mesh: Any, axis: Axis) -> Shards:
    check_mesh(mesh)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(types):
        raise ValueError(
            f"axis must be one or more different axes of the mesh, which has "
            f"{list(mesh.axis_names)}; got {axis!r}"
        )
    if manual := [name for name in axes if types[name] is AxisType.Manual]:
        raise ValueError(
            f"per_shard needs automatic or explicit mesh axes, got manual ones ({manual}). In a "
            "jax.shard_map use jaxmp.sharding.gather_params or reduce_gradients"
        )
    return Shards(automatic(mesh), axes)


def per_shard(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    mesh: Mesh | AbstractMesh,
    axis: Axis = "data",
    specs: PyTree = None,
    dtype: Any = None,
    comm_dtype: Any = None,
    loss_scale: LossScaleLike = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable[..., Any]:
    """Differentiates the mean of the devices' own losses; reduces once, in float32.

    Like `jaxmp.value_and_grad(..., reduce_dtype=jnp.float32)`, this is for `jit` with sharded
    arrays, and not for a `shard_map`. Unlike that function, it can send gradients in 16 bits and
    still add them up in float32, and reduce once for all microbatches. The cost: each device holds
    its gradients whole until they are summed, so that this saves no memory for gradients as FSDP
    does.

    `fun` sees one device's part of the batch, and knows nothing of the others:

    - A masked mean is a mean of means. For the mean over all examples, divide by the mean of the
      counts, `lax.pmean(count, axis)`; the axis has a name in `fun`.
    - Batch statistics are those of the part, unless they are computed with `lax.pmean`.
    - A typed PRNG key in the batch is split, so that each part has its own dropout. A key that
      `fun` closes over is the same in all parts: use
      `jax.random.fold_in(key, lax.axis_index(axis))`.
    - A sharding constraint in `fun` cannot name the axis.

    Args:
      fun: a function that returns a scalar float loss, or `(loss, aux)`.
      argnums: which positional arguments to differentiate: trees of floats.
      has_aux: whether `fun` returns `(loss, aux)`.
      mesh: the mesh; the axes named here have type Auto.
      axis: the mesh axis, or axes, over which the batch is split. Only a single axis has a name in
        `fun`.
      specs: the `PartitionSpec` of each param, or a prefix of that tree (a tuple of such trees for
        several `argnums`). Params that are sharded along `axis` are gathered before `fun`, and
        their gradients are returned as shards. Needed for such params and for tensor parallelism;
        without it, gradients are replicated, or sharded as the partitioner chooses.
      dtype: the dtype to which params are cast before they are gathered; by default `fun` casts.
      comm_dtype: bfloat16 sends gradients in bfloat16: half the bytes. It uses an all-to-all before
        the sum and, unless the result stays in shards, an all-gather after it. Gradients are added
        up in float32; sums that are replicated are rounded to bfloat16 once more after the sum.
      loss_scale: `opt_state.loss_scale`, a number, or None for no scaling.
      microbatches: evaluate each device's part in this many parts, one after the other.
      batch_argnums: the positional arguments to split; by default all that are not in `argnums`.
        The first dimension of each array in them is split into as many blocks as the mesh has
        devices along `axis`.

    Returns:
      A function with the arguments of `fun` that returns `(loss, grads)`, or
      `((loss, aux), grads)`, as `jaxmp.value_and_grad` does. The loss is the mean of the losses.
      Each leaf of `aux` gains a leading axis of devices, and one of microbatches if there are
      several.

    Raises:
      TypeError: if a leaf to differentiate is not a float, or the loss is not a float scalar.
      ValueError: for a mesh or an axis that does not fit, in a `shard_map`, or for a batch that
        the devices do not divide.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> loss_fn = lambda w, x: jnp.mean(jnp.square(x @ w).astype(jnp.float32))
    >>> step = jax.jit(per_shard(loss_fn, mesh=mesh, dtype="bfloat16"))
    >>> loss, grad = step(jnp.ones(2), jnp.eye(2, dtype=jnp.bfloat16))
    >>> float(loss), grad
    (1.0, Array([1., 1.], dtype=float32))
    """
    shards = shards_of(mesh, axis)
    options = GradientOptions(
        argnums=argnums,
        several=not isinstance(argnums, int),
        has_aux=has_aux,
        loss_scale=loss_scale,
        microbatches=microbatches,
        batch_argnums=batch_argnums,
        devices=shards.size,
    )
    wire = wire_of(comm_dtype, 1)  # 1, as the loss of a part is divided already
    compute = None if dtype is None else parse_dtype(dtype)

    def on_automatic_axes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        wrt = options.positions(len(args))
        for i in wrt:
            check_differentiable(args[i], f"argument {i}")
        batch = options.batch(args, wrt)
        params = tuple(args[i] for i in wrt)
        leaf_specs = _specs_of_leaves(specs, options.one_or_all(params), shards)
        params = _cast_and_gather(params, compute, leaf_specs, shards)
        operands = shards.split(batch, kwargs) | dict(zip(wrt, params, strict=True))

        def transform(scaled: Callable[..., Any], **_: Any) -> Callable[..., Any]:
            local = _evaluation_of_part(scaled, wrt, options)

            def gradient(*args: Any) -> Any:
                in_axes = [0 if i in batch else None for i in range(len(args))]
                with _explain_errors(shards.axes):
                    losses, parts, aux = shards.vmap(local, in_axes)(*args)
                parts, treedef = jax.tree.flatten(parts)
                sums = [shards.sum(x, s, wire) for x, s in zip(parts, leaf_specs, strict=True)]
                return jax.tree.unflatten(treedef, sums), (jnp.sum(losses), aux)

            return gradient

        evaluate = scaled_evaluation(functools.partial(fun, **kwargs), wrt, options, transform)
        return list(options.result(evaluate(*[operands.get(i, arg) for i, arg in enumerate(args)])))

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        return tuple(
            _call_axes(shards, options, args, kwargs).run(on_automatic_axes, [args, kwargs])
        )

    return value_and_grad_fun


def _cast_and_gather(
    params: PyTree, dtype: DType | None, leaf_specs: Sequence[Any], shards: Shards
) -> PyTree:
    # Cast first, so that devices send 16 bits.
    leaves, treedef = jax.tree.flatten(strong(params))
    leaves = leaves if dtype is None else cast_floating(leaves, dtype)
    return jax.tree.unflatten(treedef, map(shards.gather, leaves, leaf_specs))


def _call_axes(
    shards: Shards, options: GradientOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Axes:
    """Returns the explicit axes of a call, on which gradients are laid out as their params are."""
    shards.check_auto()
    params = [args[i] for i in options.positions(len(args))]
    layouts = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, params)
    mesh = explicit_mesh(jax.tree.leaves((args, kwargs)))
    return Axes(mesh, (jax.P(), options.one_or_all(layouts)))


def _evaluation_of_part(
    scaled: Callable[..., Any], wrt: tuple[int, ...], options: GradientOptions
) -> Callable[..., Evaluation]:
    """Returns a function that evaluates one device's part of the batch, under the scale."""
    differentiated = jax.grad(scaled, argnums=wrt, has_aux=True)

    def evaluate(*args: Any) -> Evaluation:
        grads, (loss, aux) = differentiated(*args)
        return Evaluation(loss, grads, aux)

    return lambda *args: options.over_microbatches(evaluate, args, wrt)


def _specs_of_leaves(specs: PyTree, params: PyTree, shards: Shards) -> list[Any]:
    """Returns the spec of each leaf, or None for each leaf without specs."""
    if specs is None:
        return [None] * len(jax.tree.leaves(params))
    leaf_specs = flat_specs(specs, params)
    for name, x, spec in zip(leaf_names(params), jax.tree.leaves(params), leaf_specs, strict=True):
        check_rank(name, jnp.ndim(x), spec)
        if unknown := axes_of_spec(spec) - set(shards.mesh.axis_names):
            raise ValueError(
                f"the {spec} of params leaf {name!r} names {sorted(unknown)}, but the mesh has "
                f"{list(shards.mesh.axis_names)}"
            )
    return leaf_specs


@contextmanager
def _explain_errors(axes: tuple[str, ...]) -> Iterator[None]:
    """Explains JAX's error about a `vmap` argument that the user did not give."""
    try:
        yield
    except ValueError as error:
        if "spmd_axis_name" in str(error):
            error.add_note(
                f"In per_shard the loss function sees one device's part of the batch, which is "
                f"placed along {axes} already: leave these axes out of its sharding constraints."
            )
        raise
