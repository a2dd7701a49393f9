"""How gradients are reduced over devices: what `value_and_grad` and its kin are told about it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import PyTree

from jaxmp._device_sums import varying_is_tracked
from jaxmp._dtypes import parse_dtype
from jaxmp._fsdp import FSDP
from jaxmp._reduction import Layout, reduced_in_float32
from jaxmp._specs import axes_of_spec


@runtime_checkable
class Reduction(Protocol):
    """How the gradients of a function are reduced."""

    def rewrite(
        self, fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]: ...

    def constrain(self, grads: tuple[PyTree, ...]) -> tuple[PyTree, ...]: ...


class GradientReduction(NamedTuple):
    """Gradients of params are summed in float32, and the params gathered as `fsdp` says.

    Attributes:
      fsdp: how params lie on the devices, or None where the partitioner decides.
      several: whether its shardings are a tuple, one tree for each argument.
    """

    fsdp: FSDP | None = None
    several: bool = False

    def layouts(self, params: Sequence[PyTree]) -> list[Layout] | None:
        """The layout of each leaf of the params."""
        if self.fsdp is None:
            return None
        return self.fsdp.layouts(tuple(params) if self.several else params[0])

    def check(self, args: PyTree) -> None:
        """Raises an error where the gradients of a function of these arrays would not be global."""
        check_no_local_gradients()
        check_no_explicit_axes(args)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if self.fsdp is not None and set(self.fsdp.axes).intersection(manual):
            raise ValueError(
                f"fsdp gathers over {', '.join(self.fsdp.axes)}, which is for jax.jit; in a "
                "jax.shard_map over it params are gathered with jaxmp.sharding.gather_params"
            )

    def rewrite(
        self, fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function and its arguments, for whose params the gradients are to be summed so."""
        self.check(args)
        layouts = self.layouts([args[i] for i in argnums])
        return reduced_in_float32(fun, args, argnums, layouts)

    def constrain(self, grads: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Gradients, laid out as the params are."""
        if self.fsdp is None:
            return grads
        constrained = self.fsdp.constrain(grads if self.several else grads[0])
        return constrained if self.several else (constrained,)


def check_no_local_gradients() -> None:
    """Raises ValueError where JAX would give each device the gradients of its own part."""
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if manual and not varying_is_tracked(manual):
        raise ValueError(
            "reduce_dtype in a jax.shard_map with check_vma=False: there nothing is reduced, and "
            "each device would go on with its own gradients. Use check_vma=True, or leave "
            "reduce_dtype out and give the gradients to jaxmp.sharding.reduce_gradients. "
            "jax.pmap is such a shard_map: use jax.jit with sharded arrays"
        )


def check_no_explicit_axes(args: Any) -> None:
    """Raises NotImplementedError for arrays that are sharded over explicit mesh axes."""
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.Array) and (axes := _explicit_axes(leaf)):
            raise NotImplementedError(
                f"reduce_dtype with arrays that are sharded over explicit mesh axes ({axes}). Use "
                "a mesh with automatic ones: jax.make_mesh(shape, names, "
                "axis_types=(jax.sharding.AxisType.Auto,) * len(names)). Or leave reduce_dtype "
                "out (for make_train_step: reduce=bfloat16 in the policy), and give "
                "params to jax.reshard(param, P(reduced={'data'})) before they are cast: their "
                "gradients are summed in float32, where JAX has rules for what is in between"
            )


def _explicit_axes(array: jax.Array) -> str:
    return ", ".join(sorted(axes_of_spec(jax.typeof(array).sharding.spec)))


def gradient_reduction(
    reduce_dtype: Any, fsdp: FSDP | None, several: bool = False
) -> GradientReduction | None:
    """What is to be done for a reduction in `reduce_dtype`; None if nothing.

    Raises:
      TypeError: if `fsdp` is no `FSDP`.
      ValueError: for a dtype in which gradients cannot be reduced so.
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
    """Raises TypeError for what is neither `FSDP` nor None."""
    if fsdp is not None and not isinstance(fsdp, FSDP):
        raise TypeError(
            f"fsdp must be jaxmp.sharding.FSDP(shardings=..., axis=...), got {type(fsdp).__name__}"
        )
