"""How gradients are reduced over devices: the options, and functions with float32 gradients."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._float32_reduction.reductions import with_float32_gradients
from jaxmp._float32_reduction.values import FLOAT32, Origin, Value
from jaxmp._mesh.device_sums import varying_is_tracked
from jaxmp._mesh.fsdp import FSDP
from jaxmp._mesh.layout import Layout
from jaxmp._numerics.dtypes import is_half, is_half_or_float32, parse_dtype
from jaxmp._program.tracing import combine, partition, trace_call


@runtime_checkable
class Reduction(Protocol):
    """A way to reduce the gradients of a function."""

    def rewrite(
        self, fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]: ...

    def constrain(self, grads: tuple[PyTree, ...]) -> tuple[PyTree, ...]: ...


class GradientReduction(NamedTuple):
    """A reduction that sums gradients of params in float32, and gathers params as `fsdp` says.

    Attributes:
      fsdp: the layout of params on the devices, or None where the partitioner decides.
      several: whether the shardings of `fsdp` are a tuple, one tree for each argument.
    """

    fsdp: FSDP | None = None
    several: bool = False

    def layouts(self, params: Sequence[PyTree]) -> list[Layout | None] | None:
        """Returns the layout of each leaf of the params; None for those that are not gathered."""
        if self.fsdp is None:
            return None
        return self.fsdp.layouts(tuple(params) if self.several else params[0])

    def check(self) -> None:
        """Raises an error if the gradients of a function would not be global here."""
        check_no_local_gradients()
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if self.fsdp is not None and set(self.fsdp.axes).intersection(manual):
            raise ValueError(
                f"fsdp gathers over {', '.join(self.fsdp.axes)}, which is for jax.jit; in a "
                "jax.shard_map over it params are gathered with jaxmp.sharding.gather_params"
            )

    def rewrite(
        self, fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function and its arguments, rewritten to sum gradients in float32."""
        self.check()
        layouts = self.layouts([args[i] for i in argnums])
        return reduce_in_float32(fun, args, argnums, layouts)

    def constrain(self, grads: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Returns the gradients in the layout of the params."""
        if self.fsdp is None:
            return grads
        constrained = self.fsdp.constrain(grads if self.several else grads[0])
        return constrained if self.several else (constrained,)


def check_no_local_gradients() -> None:
    """Raises ValueError if JAX would give each device the gradients of its own part only."""
    # There JAX does not track which arrays differ between devices, and sums no gradients.
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if manual and not varying_is_tracked(manual):
        raise ValueError(
            "reduce_dtype in a jax.shard_map with check_vma=False: there nothing is reduced, and "
            "each device would go on with its own gradients. Use check_vma=True, or leave "
            "reduce_dtype out and give the gradients to jaxmp.sharding.reduce_gradients. "
            "jax.pmap is such a shard_map: use jax.jit with sharded arrays"
        )


def gradient_reduction(
    reduce_dtype: Any, fsdp: FSDP | None, several: bool = False
) -> GradientReduction | None:
    """Returns the reduction for `reduce_dtype`; None if there is nothing to do.

    Raises:
      TypeError: if `fsdp` is not an `FSDP`.
      ValueError: for a dtype in which gradients cannot be reduced.
    """
    check_fsdp(fsdp)
    size = 4 if reduce_dtype is None and fsdp is not None else 0
    if reduce_dtype is not None:
        size = parse_dtype(reduce_dtype).itemsize
    if size not in (0, 2, 4):
        raise ValueError(
            f"gradients are reduced in float32, or in the dtype of the model; got {reduce_dtype}"
        )
    if size == 2 and fsdp is not None:
        raise ValueError(
            f"with fsdp gradients are reduced in float32, got reduce_dtype={reduce_dtype}. For "
            "half the bytes on the wire with float32 sums, use jaxmp.sharding.per_shard with "
            "comm_dtype"
        )
    return GradientReduction(fsdp, several) if size == 4 else None


def check_fsdp(fsdp: Any) -> None:
    """Raises TypeError if `fsdp` is neither an `FSDP` nor None."""
    if fsdp is not None and not isinstance(fsdp, FSDP):
        raise TypeError(
            f"fsdp must be jaxmp.sharding.FSDP(shardings=..., axis=...), got {type(fsdp).__name__}"
        )


def reduce_in_float32(
    fun: Callable[..., Any],
    args: Sequence[Any],
    argnums: Sequence[int],
    layouts: Sequence[Layout | None] | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function of wider params: the same value, with float32 gradients.

    Args:
      fun: a function of pytrees.
      args: its arguments.
      argnums: which of them are params.
      layouts: the layouts of the leaves of the params, if they are to be gathered.

    Returns:
      The function, for arguments of these types, and the arguments, with 16-bit params cast to
      float32. The value is computed with the params in their given dtypes.
    """
    args = tuple(jax.tree.map(jnp.asarray, x) if i in argnums else x for i, x in enumerate(args))
    # NumPy arrays are not traced: a program may depend on masks and lengths, and return 64-bit
    # numbers.
    static, arrays = partition((args, {}), numpy=False)
    traced = trace_call(fun, static, arrays, as_jit=True, numpy=False)
    # For each array argument a tuple of its layout if it is a param, else None. Layouts come in the
    # order of `argnums`, arrays in that of the arguments.
    layouts_left = itertools.repeat(None) if layouts is None else iter(layouts)
    by_argument: dict[int, list[tuple[Layout | None] | None]] = {}
    for i in argnums:
        pairs = [(leaf, next(layouts_left)) for leaf in jax.tree.leaves(args[i])]
        by_argument[i] = [(layout,) if is_half_or_float32(leaf) else None for leaf, layout in pairs]
    marks = [
        mark
        for i, arg in enumerate(args)
        for mark in (
            by_argument[i] if i in by_argument else [None] * len(partition(arg, numpy=False)[1])
        )
    ]

    def of_arrays(*both: Any) -> list[Any]:
        narrow, sources = both[: len(arrays)], both[len(arrays) :]
        values = [
            Value(source)
            if mark is None
            else Value(source if x.dtype == FLOAT32 else x, source, *mark, Origin.WEIGHT)
            for x, source, mark in zip(narrow, sources, marks, strict=True)
        ]
        return [value.ungathered() for value in with_float32_gradients(traced.closed, values)]

    # `arrays` has the params in their given dtypes, with which the value is computed.
    def rewritten(*args: Any) -> Any:
        _, sources = partition(args, numpy=False)
        return combine(traced.returned, traced.axes.run(of_arrays, [*arrays, *sources]))

    # Gradients of other params, of 8 bits say, are not summed here.
    new_args = list(args)
    for i in argnums:
        new_args[i] = jax.tree.map(lambda x: x.astype(FLOAT32) if is_half(x) else x, args[i])
    return rewritten, tuple(new_args)
