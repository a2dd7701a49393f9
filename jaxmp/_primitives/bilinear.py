"""A product as a trilinear form: the float32 maps that make up its derivatives.

Batching and transposition are derived from JAX's own rules for the float32 product, once for each
shape. The derived map then runs in 16 bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun

from jaxmp._numerics.dtypes import DType
from jaxmp._primitives.gathering import (
    Gather,
    gathered,
    pinned_operands,
    scattered,
    with_batch_axis,
)
from jaxmp._primitives.operands import ProductOperand, operands_of
from jaxmp._program import compat
from jaxmp._program.evaluate import Rules, evaluate
from jaxmp._program.program import Op, Program, read

# A bilinear map has three roles: two operands and the result. Its transpose with respect to an
# operand exchanges that operand and the result, so that repeated transposition gives only three
# maps. A map is named by the role that it returns.
RESULT = 2
_Axes = tuple[int | None, ...]
# An array of a map, or codes in float8 and their scale.
Cell = tuple[Any, ...]
# How each operand is gathered; None if it is not.
Gathers = tuple[Gather | None, ...]
NO_GATHERS: Gathers = (None, None)


def slots(returned: int) -> tuple[int, int]:
    """Returns the roles of the two operands of the map that returns a role."""
    return (RESULT if returned == 0 else 0, RESULT if returned == 1 else 1)


class BilinearMap:
    """One product for given shapes: the float32 maps from any two of its roles to the third.

    Opaque, so that code which scans jaxprs for product dtypes does not find the float32 maps
    inside.

    Attributes:
      primitive: the product.
      compute: the dtype of the multiplication: 16-bit, except for products with float32 results.
      shapes: the shapes of the three roles.
      others: the abstract values of the integer operands.
      gathers: how each operand is gathered before it is multiplied.
    """

    def __init__(
        self,
        primitive: Primitive,
        compute: DType,
        shapes: tuple[tuple[int, ...], ...],
        others: tuple[Any, ...],
        given: Mapping[int, Callable[..., Any]],
        gathers: Gathers = NO_GATHERS,
    ) -> None:
        self.primitive = primitive
        self.compute = compute
        self.shapes = shapes
        self.others = others
        self.gathers = gathers
        self._given = given  # the given maps; the missing ones are transposes of them
        self._cache: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"{self.primitive.name}{[list(shape) for shape in self.shapes]}"

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            with no_mesh():
                self._cache[key] = make()
        return self._cache[key]

    def _struct(self, role: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shapes[role], dtype)

    def float32_map(self, returned: int) -> Any:
        """Returns the float32 jaxpr that computes one role from the two others."""

        def make() -> Any:
            function = self._given.get(returned) or functools.partial(self._transposed, returned)
            structs = [self._struct(role) for role in slots(returned)]
            return jax.make_jaxpr(function)(*structs, *self.others)

        return self._cached(returned, make)

    def _transposed(self, returned: int, *args: Any) -> Any:
        source = max(self._given)
        known = dict(zip(slots(returned), args[:2], strict=True))

        def function(unknown: Any) -> Any:
            operands = [unknown if role == returned else known[role] for role in slots(source)]
            return self._given[source](*operands, *args[2:])

        (out,) = jax.linear_transpose(function, self._struct(returned))(known[source])
        return out

    def multiplied(
        self,
        returned: int,
        operands: Sequence[ProductOperand],
        others: Sequence[Any],
        dtype: Any,
        *,
        exact: bool = False,
    ) -> Any:
        """Makes a role from the two others, and the integer operands.

        Operands are cast and gathered, and the gradient of an operand is scattered.

        Args:
          returned: the role to make.
          operands: the operands.
          others: the integer operands.
          dtype: the dtype of the result.
          exact: whether to multiply the 16-bit numbers as float32.
        """
        gathers = (*self.gathers, None)
        arrays = [
            gathered(cast(x.value, self.compute), gathers[role])
            for x, role in zip(operands, slots(returned), strict=True)
        ]
        widest = max(dtype, self.compute, key=lambda x: np.dtype(x).itemsize)
        if exact:
            arrays, widest = [cast(x, np.float32) for x in arrays], np.float32

        def product(op: Op, cells: list[Cell]) -> Cell:
            narrow = [array for (array,) in cells]
            return tuple(compat.bind(op.equation, narrow, preferred_element_type=np.dtype(widest)))

        return self.run(returned, [(x,) for x in (*arrays, *others)], dtype, product)[0]

    def run(self, returned: int, cells: list[Cell], dtype: Any, product: "_Product") -> Cell:
        """Runs a float32 map on other cells, with another product; scatters what it returns."""
        program = read(self.float32_map(returned))
        rules = _Multiplying(program, self.primitive, product, (*self.gathers, None)[returned])
        ((result, *scales),) = evaluate(program, cells, rules)
        # Compilers sum and scatter at once only if nothing lies in between: scales come last.
        result = result if scales else cast(result, dtype)
        return scattered(result, rules.gather, is_summed_whole=not rules.is_open), *scales

    def realized(
        self, returned: int, kept: Any, avals: tuple[tuple[Any, Any], ...], dtype: Any
    ) -> Any:
        """Returns the jaxpr that multiplies in 16 bits, or in float8.

        Args:
          returned: the role to make.
          kept: the facts about the two operands.
          avals: the shapes and dtypes of all arrays of the equation.
          dtype: the dtype of the result.
        """

        def function(*args: Any) -> Any:
            return self.multiplied(returned, *operands_of(args, kept), dtype)

        def make() -> Any:
            return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(*aval) for aval in avals])

        return self._cached((returned, kept, avals, dtype), make)

    def batched(self, axes: _Axes, other_axes: _Axes, size: int) -> "BilinearMap":
        """Returns the map of `size` products; the axis of an unbatched operand is None."""

        def make() -> BilinearMap:
            def shape(old: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
                return old if axis is None else (*old[:axis], size, *old[axis:])

            shapes = tuple(map(shape, self.shapes, axes))
            others = tuple(
                jax.ShapeDtypeStruct(shape(x.shape, axis), x.dtype)
                for x, axis in zip(self.others, other_axes, strict=True)
            )
            given = {
                role: jax.vmap(
                    function_of(self.float32_map(role)),
                    in_axes=(*(axes[i] for i in slots(role)), *other_axes),
                    out_axes=axes[role],
                )
                for role in range(3)
                if axes[role] is not None
            }
            gathers = tuple(map(with_batch_axis, self.gathers, axes[:RESULT]))
            return self._made(shapes, others, given, gathers, axes)

        return self._cached((axes, other_axes, size), make)

    def gathering(self, gathers: Gathers) -> "BilinearMap":
        """Returns the map of the same product of operands that are gathered first."""

        def make() -> BilinearMap:
            given = {RESULT: function_of(self.float32_map(RESULT))}
            return self._made(self.shapes, self.others, given, gathers)

        return self._cached(("gathering", gathers), make)

    def _made(
        self, shapes: Any, others: Any, given: Any, gathers: Gathers, axes: _Axes = ()
    ) -> "BilinearMap":
        """Returns a map like this one; `axes` are the axes that its roles have in addition."""
        del axes
        return BilinearMap(self.primitive, self.compute, shapes, others, given, gathers)


@functools.lru_cache(maxsize=1024)
def bilinear_map(
    primitive: Primitive,
    params: tuple[tuple[str, Any], ...],
    compute: DType,
    avals: tuple[tuple[tuple[int, ...], Any], ...],
    gathers: Gathers = NO_GATHERS,
) -> BilinearMap:
    """Returns the map of a product: one object for equal products, so that jit caches find it."""

    def function(*operands: Any) -> Any:
        wide = {**dict(params), "preferred_element_type": np.dtype(np.float32)}
        return primitive.bind(*operands, **wide)

    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape, _ in avals[:2]]
    others = tuple(jax.ShapeDtypeStruct(*aval) for aval in avals[2:])
    with no_mesh():
        result = jax.eval_shape(function, *operands, *others)
    shapes = (*(x.shape for x in operands), result.shape)
    return BilinearMap(primitive, compute, shapes, others, {RESULT: function}, gathers)


def no_mesh() -> Any:
    """Hides the mesh of the first caller from traces that are cached."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def function_of(jaxpr: Any) -> Callable[..., Any]:
    return lambda *args: jaxpr_as_fun(jaxpr)(*args)[0]


def cast(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(x, dtype)


_Product = Callable[[Op, list[Cell]], Cell]


@dataclasses.dataclass
class _Multiplying(Rules[Cell]):
    """Runs a float32 map with another product.

    Around the product there are only moves, reshapes and sums: they take any dtype.
    """

    program: Program
    primitive: Primitive
    product: _Product
    gather: Gather | None
    is_open: bool = False  # whether the result can be scattered while it is summed

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def operation(self, op: Op, operands: list[Cell]) -> list[Cell]:
        arrays, *scales = zip(*operands, strict=True)
        if op.equation.primitive is self.primitive:
            after = [each.equation for each in self.program.ops[op.number + 1 :]]
            pinned = pinned_operands(arrays, op.equation, after, self.gather)
            self.is_open = pinned is not None
            return [self.product(op, list(zip(pinned or arrays, *scales, strict=True)))]
        if scales and op.name != "transpose":
            raise NotImplementedError(f"float8 operands cannot go through {op.name}")
        return [tuple(compat.bind(op.equation, each)[0] for each in (arrays, *scales))]
