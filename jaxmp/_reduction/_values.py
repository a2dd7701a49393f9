"""A value of a program that is being rewritten, and what it has to do with params."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmp._dtypes import DType
from jaxmp._float32_gradients import held, varying_alike, varying_as
from jaxmp._reduction._gradient_of import gradient_of
from jaxmp._reduction._layout import Layout
from jaxmp._trilinear import Gather, gathered

FLOAT32 = jnp.dtype(jnp.float32)
HALVES = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16)))


class Laid(enum.IntEnum):
    """What data has done to a weight, the most of it."""

    NOTHING = 0
    SCALED = 1  # a mask, a temperature, a norm
    ADDED = 2  # noise, frozen numbers


class Value(NamedTuple):
    """A value.

    What is made of params alone has two arrays: the one that the program computes, and the
    float32 one that its gradient is for. They are one and the same where that is float32.

    Attributes:
      array: the array, as the program computes it.
      wide: where its gradient goes; None for what is not made of params.
      layout: how it lies on the devices, if it is to be gathered where it is used.
      rows: whether data chose among params, or where they are: rows that were looked up.
      laid: what data was laid over it.
      repeated: whether it holds the numbers of a param many times: a bias, laid out along rows.
      fixed: whether no data has a part in it: a number of the program, or what compares params.
        NumPy arrays that a function closes over are such numbers; those of JAX may be a batch.
      met: whether these are activations, in which params have met data.
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
        """Whether the array is the one that its gradient is for."""
        return self.array is self.wide

    def used(self, others: Sequence[Any] = ()) -> Any:
        """The array for an operation on activations: gathered, its gradient in float32.

        In a `shard_map` it varies over the devices as the others do, before it is narrow: the sum
        over devices that its gradient needs for that is one in float32.
        """
        if self.wide is None:
            return self.array
        value = self.in_place()
        array, wide, *_ = varying_alike([value.array, value.wide, *others])
        return array if value.exact else gradient_of(array, wide)

    def bare(self) -> Any:
        """The array where it lies, its gradient in float32."""
        return self.array if self.wide is None or self.exact else gradient_of(*self[:2])

    def low(self) -> Any:
        """The array in the dtype in which it is gathered."""
        dtype = None if self.layout is None else self.layout.dtype
        if dtype is None or dtype.itemsize >= self.array.dtype.itemsize:
            return self.array
        return lax.convert_element_type(self.array, dtype)

    def product_operand(self) -> tuple[Any, Any, Gather]:
        """For a product: the array, the source of its gradient, and how the product gathers it."""
        if self.layout is None or self.layout.recomputed:
            value = self.in_place()
            return value.array, value.wide, None
        return self.array, self.wide, self.layout.ends

    def in_place(self) -> "Value":
        """The same, gathered already.

        Its gradient is summed whole, then scattered over the devices: scattered alone, it would
        have the partitioner split the operation that it comes from.
        """
        if self.layout is None:
            return self
        ends = self.layout.ends
        whole = lax.convert_element_type(gathered(self.low(), ends), self.array.dtype)
        return self._replace(array=held(whole), wide=gathered(self.wide, ends), layout=None)

    def varying_as(self, like: Any) -> "Value":
        """In a `shard_map`: a param, varying over the mesh axes over which an array does."""
        if self.wide is None:
            return self
        array = varying_as(self.array, like)
        wide = array if self.exact else varying_as(self.wide, like)
        return self._replace(array=array, wide=wide)

    def spread(self, shape: tuple[int, ...]) -> "Value":
        """The same, laid out along an activation of this shape; what is no param is not."""
        if not self.of_params or self.array.shape == shape:
            return self
        dims = tuple(range(len(shape) - self.array.ndim, len(shape)))
        array = lax.broadcast_in_dim(self.array, shape, dims)
        wide = array if self.exact else lax.broadcast_in_dim(self.wide, shape, dims)
        return self._replace(array=array, wide=wide, layout=None, repeated=True)


class Form(NamedTuple):
    """What there is to know of a value beside its arrays: the same, and in the same order."""

    of_params: bool
    exact: bool
    layout: Layout | None = None
    rows: bool = False
    laid: Laid = Laid.NOTHING
    repeated: bool = False
    fixed: bool = False
    met: bool = False


def like_param(x: Any) -> Value:
    """What is made of params. Of 16 bits, its gradient is rounded, but when it has been summed."""
    return Value(held(x), widened(x)) if is_half(x) else Value(x, x)


def form_of(value: Value) -> Form:
    return Form(value.of_params, value.exact, *value[2:])


def common_form(forms: Sequence[Form]) -> Form:
    """What is known of a value that comes in one of several forms."""
    met = any(form.met for form in forms)
    if met or not any(form.of_params for form in forms):
        fixed = all(form.fixed for form in forms)
        return Form(of_params=False, exact=False, fixed=fixed, met=met)
    layouts = {form.layout for form in forms}
    layout = layouts.pop() if len(layouts) == 1 else None
    laid = [form.laid for form in forms]
    if not all(form.of_params or form.fixed for form in forms):
        laid.append(Laid.ADDED)
    return Form(
        of_params=True,
        # One that is gathered for it comes in two arrays.
        exact=all(form.exact and form.layout == layout for form in forms),
        layout=layout,
        rows=any(form.rows for form in forms),
        laid=max(laid),
        repeated=any(form.repeated for form in forms),
    )


def in_form(value: Value, form: Form) -> Value:
    """A value in a form that is common to it and to others."""
    if not form.of_params:
        return Value(value.used(), fixed=form.fixed, met=form.met)
    value = value if value.of_params else like_param(value.array)
    value = value if value.layout == form.layout else value.in_place()
    if value.exact and not form.exact:
        value = value._replace(array=held(value.array), wide=widened(value.wide))
    return value._replace(rows=form.rows, laid=form.laid, repeated=form.repeated)


def widened(x: Any) -> Any:
    """A float of fewer bits as float32, which its gradient is for."""
    return lax.convert_element_type(x, FLOAT32) if is_short(x.dtype) else x


def flat(values: Sequence[Value]) -> tuple[list[Any], tuple[Form, ...]]:
    """The arrays of values, to be handed to another program, and what to make of them there."""
    arrays: list[Any] = []
    for value in values:
        arrays.append(value.array)
        if value.of_params and not value.exact:
            arrays.append(value.wide)
    return arrays, tuple(map(form_of, values))


def unflat(arrays: Sequence[Any], forms: Sequence[Form]) -> list[Value]:
    """The inverse of `flat`."""
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
    """Whether it is a float of 32 bits or fewer: real, and none of extended dtypes as keys have."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= FLOAT32.itemsize


def is_ours(x: Any) -> bool:
    """Whether it is a float that may be a param: of 16 bits, or float32."""
    return is_half(x) or getattr(x, "dtype", None) == FLOAT32


def is_float(x: Any) -> bool:
    dtype: DType | None = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
