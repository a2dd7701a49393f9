"""A product as a trilinear form: the float32 maps that make up its derivatives.

Batching and transposition are derived from JAX's own rules for the float32 product, once for each
shape. The derived map then runs in 16 bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.rounding import open_cast
from jaxmp._primitives.gathering import (
    Gather,
    gathered,
    pinned_operands,
    scattered,
    with_batch_axis,
)
from jaxmp._primitives.operands import ProductOperand, operands_of
from jaxmp._program import compat
from jaxmp._program.evaluate import Interpreter, evaluate
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


def operand_roles(result_role: int) -> tuple[int, int]:
    """Returns the roles of the two operands of the map that returns a role."""
    return (RESULT if result_role == 0 else 0, RESULT if result_role == 1 else 1)


class BilinearMap:
    """One product for given shapes: the float32 maps from any two of its roles to the third.

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
        maps: Mapping[int, Callable[..., Any]],
        gathers: Gathers = NO_GATHERS,
    ) -> None:
        self.primitive = primitive
        self.compute = compute
        self.shapes = shapes
        self.others = others
        self.gathers = gathers
        self._maps = maps  # by the role that they return; a missing one is a transpose of the last
        self._cache: dict[Any, Any] = {}

    # A param of equations, and opaque: code which scans jaxprs for product dtypes must not find the
    # float32 maps.
    def __repr__(self) -> str:
        return f"{self.primitive.name}{[list(shape) for shape in self.shapes]}"

    def _memoize(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            with without_caller():
                self._cache[key] = make()
        return self._cache[key]

    def _struct(self, role: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shapes[role], dtype)

    def float32_map(self, result_role: int) -> Any:
        """Returns the float32 jaxpr that computes one role from the two others."""

        def transposed(*args: Any) -> Any:
            base = max(self._maps)
            arrays = dict(zip(operand_roles(result_role), args[:2], strict=True))

            def function(x: Any) -> Any:
                operands = [(arrays | {result_role: x})[role] for role in operand_roles(base)]
                return self._maps[base](*operands, *args[2:])

            (out,) = jax.linear_transpose(function, self._struct(result_role))(arrays[base])
            return out

        def trace() -> Any:
            structs = [self._struct(role) for role in operand_roles(result_role)]
            function = self._maps.get(result_role, transposed)
            return jax.make_jaxpr(function)(*structs, *self.others)

        return self._memoize(result_role, trace)

    def multiplied(
        self,
        result_role: int,
        operands: Sequence[ProductOperand],
        others: Sequence[Any],
        dtype: Any,
        *,
        exact: bool = False,
    ) -> Any:
        """Makes a role from the two others, and the integer operands, in a dtype.

        Operands are cast and gathered, and the gradient of an operand is scattered. If `exact`, the
        16-bit numbers are multiplied as float32.
        """
        gathers = (*self.gathers, None)
        # The gradient of a float32 result may be a sum over devices.
        arrays = [
            gathered((open_cast if role == RESULT else cast)(x.value, self.compute), gathers[role])
            for x, role in zip(operands, operand_roles(result_role), strict=True)
        ]
        result_dtype = max(dtype, self.compute, key=lambda x: np.dtype(x).itemsize)
        if exact:
            arrays, result_dtype = [cast(x, np.float32) for x in arrays], np.float32

        def multiply(op: Op, cells: list[Cell]) -> Cell:
            params = {"preferred_element_type": np.dtype(result_dtype)}
            return tuple(compat.bind(op.equation, [x for (x,) in cells], **params))

        return self.run(result_role, [(x,) for x in (*arrays, *others)], dtype, multiply)[0]

    def run(self, result_role: int, cells: list[Cell], dtype: Any, multiply: "_Multiply") -> Cell:
        """Runs a float32 map on other cells, with another product; scatters its result."""
        program = read(self.float32_map(result_role))
        interpreter = _ProductInterpreter(
            program, self.primitive, multiply, (*self.gathers, None)[result_role]
        )
        ((result, *scales),) = evaluate(program, cells, interpreter)
        # Compilers sum and scatter at once only if no operation is between: scales come last.
        result = result if scales else cast(result, dtype)
        return scattered(
            result, interpreter.gather, is_summed_whole=not interpreter.is_open
        ), *scales

    def realized(
        self, result_role: int, specs: Any, avals: tuple[tuple[Any, Any], ...], dtype: Any
    ) -> Any:
        """Returns the jaxpr that multiplies in 16 bits, or in float8, for arrays of these avals."""

        def function(*args: Any) -> Any:
            return self.multiplied(result_role, *operands_of(args, specs), dtype)

        def trace() -> Any:
            return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(*aval) for aval in avals])

        return self._memoize((result_role, specs, avals, dtype), trace)

    def batched(self, axes: _Axes, other_axes: _Axes, size: int) -> "BilinearMap":
        """Returns the map of `size` products; the axis of an unbatched operand is None."""

        def make() -> BilinearMap:
            def with_axis(old: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
                return old if axis is None else (*old[:axis], size, *old[axis:])

            shapes = tuple(map(with_axis, self.shapes, axes))
            others = tuple(
                jax.ShapeDtypeStruct(with_axis(x.shape, axis), x.dtype)
                for x, axis in zip(self.others, other_axes, strict=True)
            )
            maps = {
                role: jax.vmap(
                    function_of(self.float32_map(role)),
                    in_axes=(*(axes[i] for i in operand_roles(role)), *other_axes),
                    out_axes=axes[role],
                )
                for role in range(3)
                if axes[role] is not None
            }
            gathers = tuple(map(with_batch_axis, self.gathers, axes[:RESULT]))
            return self._new_map(shapes, others, maps, gathers, axes)

        return self._memoize((axes, other_axes, size), make)

    def gathering(self, gathers: Gathers) -> "BilinearMap":
        """Returns the map of the same product of operands that are gathered first."""

        def make() -> BilinearMap:
            maps = {RESULT: function_of(self.float32_map(RESULT))}
            return self._new_map(self.shapes, self.others, maps, gathers)

        return self._memoize(("gathering", gathers), make)

    def _new_map(
        self, shapes: Any, others: Any, maps: Any, gathers: Gathers, axes: _Axes = ()
    ) -> "BilinearMap":
        del axes  # those that roles have in addition: maps in float8 group them
        return BilinearMap(self.primitive, self.compute, shapes, others, maps, gathers)


# One object for equal products: the map is a param, and jit finds a program by its params.
@functools.lru_cache(maxsize=1024)
def bilinear_map(
    primitive: Primitive,
    params: tuple[tuple[str, Any], ...],
    compute: DType,
    avals: tuple[tuple[tuple[int, ...], Any], ...],
    gathers: Gathers = NO_GATHERS,
) -> BilinearMap:
    """Returns the map of a product."""

    def function(*operands: Any) -> Any:
        float32_params = {**dict(params), "preferred_element_type": np.dtype(np.float32)}
        return primitive.bind(*operands, **float32_params)

    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape, _ in avals[:2]]
    others = tuple(jax.ShapeDtypeStruct(*aval) for aval in avals[2:])
    with without_caller():
        result = jax.eval_shape(function, *operands, *others)
    shapes = (*(x.shape for x in operands), result.shape)
    return BilinearMap(primitive, compute, shapes, others, {RESULT: function}, gathers)


@contextlib.contextmanager
def without_caller() -> Iterator[None]:
    """Traces for many callers: a cached trace must not have the mesh or the lines of the first."""
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), compat.without_lines():
        yield


def function_of(jaxpr: Any) -> Callable[..., Any]:
    return lambda *args: jaxpr_as_fun(jaxpr)(*args)[0]


def cast(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(x, dtype)


_Multiply = Callable[[Op, list[Cell]], Cell]


@dataclasses.dataclass
class _ProductInterpreter(Interpreter[Cell]):
    """Runs a float32 map with another product."""

    program: Program
    primitive: Primitive
    multiply: _Multiply
    gather: Gather | None
    is_open: bool = False  # whether the result can be scattered while it is summed

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def operation(self, op: Op, operands: list[Cell]) -> list[Cell]:
        arrays, *scales = zip(*operands, strict=True)
        if op.equation.primitive is self.primitive:
            equations = [later.equation for later in self.program.ops[op.number + 1 :]]
            pins = pinned_operands(arrays, op.equation, equations, self.gather)
            self.is_open = pins is not None
            return [self.multiply(op, list(zip(pins or arrays, *scales, strict=True)))]
        if scales and op.name != "transpose":
            raise NotImplementedError(f"float8 operands cannot go through {op.name}")
        # Around the product there are only moves, reshapes and sums, which take any dtype.
        return [tuple(compat.bind(op.equation, component)[0] for component in (arrays, *scales))]
