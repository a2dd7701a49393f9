"""Values of a program that is being rewritten, and how they depend on params."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmp._mesh.layout import Layout
from jaxmp._numerics.dtypes import DType
from jaxmp._primitives.bilinear import Gather, gathered
from jaxmp._primitives.gradient_of import gradient_of
from jaxmp._primitives.mixed_product import held, varying_alike, varying_as

FLOAT32 = jnp.dtype(jnp.float32)
HALVES = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16)))


class Laid(enum.IntEnum):
    """The strongest thing that data has done to a weight."""

    NOTHING = 0
    SCALED = 1  # a mask, a temperature, a norm
    ADDED = 2  # noise, frozen numbers


class Value(NamedTuple):
    """A value of the program.

    A value made of params alone has two arrays: the one that the program computes, and the float32
    array that its gradient is for. They are the same array if the program computes in float32.

    Attributes:
      array: the array, as the program computes it.
      wide: the array that its gradient goes to; None for values that are not made of params.
      layout: its layout on the devices, if it is gathered where it is used.
      rows: whether data chose among params, or their positions: rows that were looked up.
      laid: the kind of data that was laid over it.
      repeated: whether it repeats the numbers of a param: a bias, broadcast along rows.
      fixed: whether it depends on no data: a number of the program, or a comparison of params.
        NumPy arrays that a function closes over count as fixed; JAX arrays do not, as they may be a
        batch.
      met: whether it is an activation, in which params have met data.
    """

    array: Any
    wide: Any = None
    layout: Layout | None = None
    rows: bool = False
    laid: Laid = Laid.NOTHING
    repeated: bool = False
    fixed: bool = False
    met: bool = False

    @property
    def of_params(self) -> bool:
        return self.wide is not None

    @property
    def exact(self) -> bool:
        """Whether the gradient is for the array itself."""
        return self.array is self.wide

    def used(self, others: Sequence[Any] = ()) -> Any:
        """Returns the array for an operation on activations: gathered, with a float32 gradient.

        In a `shard_map` the array is made to vary over the devices as the other arrays do before it
        is narrowed. So the sum over devices that this adds to its gradient is in float32.
        """
        if self.wide is None:
            return self.array
        value = self.in_place()
        array, wide, *_ = varying_alike([value.array, value.wide, *others])
        return array if value.exact else gradient_of(array, wide)

    def bare(self) -> Any:
        """Returns the array without a gather, with a float32 gradient."""
        return self.array if self.wide is None or self.exact else gradient_of(*self[:2])

    def low(self) -> Any:
        """Returns the array in the dtype in which it is gathered."""
        dtype = None if self.layout is None else self.layout.dtype
        if dtype is None or dtype.itemsize >= self.array.dtype.itemsize:
            return self.array
        return lax.convert_element_type(self.array, dtype)

    def product_operand(self) -> tuple[Any, Any, Gather]:
        """Returns the array for a product, the source of its gradient, and its gather."""
        if self.layout is None or self.layout.recomputed:
            value = self.in_place()
            return value.array, value.wide, None
        return self.array, self.wide, self.layout.ends

    def in_place(self) -> "Value":
        """Returns the gathered value.

        Its gradient is summed whole, then scattered over the devices. If it were only scattered,
        the partitioner would split the operation that computes it.
        """
        if self.layout is None:
            return self
        ends = self.layout.ends
        whole = lax.convert_element_type(gathered(self.low(), ends), self.array.dtype)
        return self._replace(array=held(whole), wide=gathered(self.wide, ends), layout=None)

    def varying_as(self, like: Any) -> "Value":
        """Makes a param in a `shard_map` vary over the mesh axes over which an array varies."""
        if self.wide is None:
            return self
        array = varying_as(self.array, like)
        wide = array if self.exact else varying_as(self.wide, like)
        return self._replace(array=array, wide=wide)

    def spread(self, shape: tuple[int, ...]) -> "Value":
        """Broadcasts a param to this shape; returns other values unchanged."""
        if not self.of_params or self.array.shape == shape:
            return self
        dims = tuple(range(len(shape) - self.array.ndim, len(shape)))
        array = lax.broadcast_in_dim(self.array, shape, dims)
        wide = array if self.exact else lax.broadcast_in_dim(self.wide, shape, dims)
        return self._replace(array=array, wide=wide, layout=None, repeated=True)


class Traits(NamedTuple):
    """The facts about a value without its arrays; fields as in `Value`, in the same order."""

    of_params: bool
    exact: bool
    layout: Layout | None = None
    rows: bool = False
    laid: Laid = Laid.NOTHING
    repeated: bool = False
    fixed: bool = False
    met: bool = False


def like_param(x: Any) -> Value:
    """Wraps a value made of params; a 16-bit gradient is summed first, then rounded."""
    return Value(held(x), widened(x)) if is_half(x) else Value(x, x)


def traits_of(value: Value) -> Traits:
    return Traits(value.of_params, value.exact, *value[2:])


def common_traits(forms: Sequence[Traits]) -> Traits:
    """Returns the traits of a value with one of several sets of traits."""
    met = any(form.met for form in forms)
    if met or not any(form.of_params for form in forms):
        fixed = all(form.fixed for form in forms)
        return Traits(of_params=False, exact=False, fixed=fixed, met=met)
    layouts = {form.layout for form in forms}
    layout = layouts.pop() if len(layouts) == 1 else None
    laid = [form.laid for form in forms]
    if not all(form.of_params or form.fixed for form in forms):
        laid.append(Laid.ADDED)
    return Traits(
        of_params=True,
        # A value that is gathered to match comes in two arrays.
        exact=all(form.exact and form.layout == layout for form in forms),
        layout=layout,
        rows=any(form.rows for form in forms),
        laid=max(laid),
        repeated=any(form.repeated for form in forms),
    )


def with_traits(value: Value, form: Traits) -> Value:
    """Converts a value to the traits that it shares with others."""
    if not form.of_params:
        return Value(value.used(), fixed=form.fixed, met=form.met)
    value = value if value.of_params else like_param(value.array)
    value = value if value.layout == form.layout else value.in_place()
    if value.exact and not form.exact:
        value = value._replace(array=held(value.array), wide=widened(value.wide))
    return value._replace(rows=form.rows, laid=form.laid, repeated=form.repeated)


def widened(x: Any) -> Any:
    """Casts a float of fewer bits to float32, to carry its gradient."""
    return lax.convert_element_type(x, FLOAT32) if is_short(x.dtype) else x


def flat(values: Sequence[Value]) -> tuple[list[Any], tuple[Traits, ...]]:
    """Returns the arrays of values, for another program, and the traits to rebuild them there."""
    arrays: list[Any] = []
    for value in values:
        arrays.append(value.array)
        if value.of_params and not value.exact:
            arrays.append(value.wide)
    return arrays, tuple(map(traits_of, values))


def unflat(arrays: Sequence[Any], forms: Sequence[Traits]) -> list[Value]:
    """Rebuilds values: the inverse of `flat`."""
    given = iter(arrays)
    values = []
    for form in forms:
        array = next(given)
        wide = None if not form.of_params else array if form.exact else next(given)
        values.append(Value(array, wide, *form[2:]))
    return values


def is_half(x: Any) -> bool:
    return getattr(x, "dtype", None) in HALVES


def is_short(dtype: Any) -> bool:
    """Whether a dtype is a real float of 32 bits or fewer; the extended dtypes of keys are not."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= FLOAT32.itemsize


def may_be_param(x: Any) -> bool:
    """Whether a value may be a param: a float of 16 or 32 bits."""
    return is_half(x) or getattr(x, "dtype", None) == FLOAT32


def is_float(x: Any) -> bool:
    dtype: DType | None = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
