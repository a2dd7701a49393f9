"""Values of a program that is being rewritten, and how they depend on params."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._mesh.layout import Layout
from jaxmp._numerics.dtypes import is_half, is_inexact
from jaxmp._numerics.rounding import open_cast
from jaxmp._primitives.gathering import Gather, gathered
from jaxmp._primitives.gradient_of import gradient_of
from jaxmp._primitives.mixed_product import detach
from jaxmp._primitives.varying import varying_alike, varying_as

FLOAT32 = jnp.dtype(jnp.float32)


class Origin(enum.IntEnum):
    """What a value is made of. The order is that of `max`, where several values meet."""

    NUMBER = 0  # the program's own numbers, NumPy arrays among them, and comparisons of params
    DATA = 1  # other arguments, JAX arrays that the loss closes over, and what is made of them
    ACTIVATION = 2  # params and data; all values up to here have no float32 array
    WEIGHT = 3  # params alone, and numbers
    SCALED = 4  # a weight times a mask, a temperature, a norm
    ADDED = 5  # a weight plus noise or frozen weights
    REPEATED = 6  # a param that was laid out along other axes: a bias
    ROWS = 7  # numbers of a param that data chose: rows that were looked up


class Traits(NamedTuple):
    """The facts about a value without its arrays; fields as in `Value`, in the same order."""

    exact: bool
    layout: Layout | None = None
    origin: Origin = Origin.DATA
    summed: bool = False

    @property
    def of_params(self) -> bool:
        return self.origin >= Origin.WEIGHT


class Value(NamedTuple):
    """A value of the program: a tree of one array, or of two.

    A value made of params has two arrays: the one that the program computes, and the float32 array
    that its gradient is for. They are the same array if the program computes in float32.

    Attributes:
      array: the array, as the program computes it.
      source: the array that its gradient goes to; None for values that are not made of params.
      layout: its layout on the devices, if it is gathered where it is used.
      origin: whether params, data or numbers make it.
      summed: whether the array may be a float32 sum over devices, up to what rounds alike.
    """

    array: Any
    source: Any = None
    layout: Layout | None = None
    origin: Origin = Origin.DATA
    summed: bool = False

    @property
    def of_params(self) -> bool:
        return self.origin >= Origin.WEIGHT

    @property
    def exact(self) -> bool:
        """Whether the gradient is for the array itself."""
        return self.array is self.source

    @property
    def traits(self) -> Traits:
        return Traits(self.exact, self.layout, self.origin, self.summed)

    @property
    def is_gathered(self) -> bool:
        """Whether the array is gathered for products, and the gradient is not yet scattered."""
        return self.layout is not None and self.layout.gathered

    def operand(self, others: Sequence[Any] = ()) -> Any:
        """Returns the array for an operation on activations: gathered, with a float32 gradient."""
        if not self.of_params:
            return self.array
        value = self.in_place()
        # In a `shard_map`, the transpose of this is a sum over devices. It stands before the cast
        # to 16 bits, so that the sum is in float32.
        array, source, *_ = varying_alike([value.array, value.source, *others])
        return array if value.exact else gradient_of(array, source)

    def ungathered(self) -> Any:
        """Returns the array without a gather, with a float32 gradient."""
        return self.array if not self.of_params or self.exact else gradient_of(*self[:2])

    def in_float32(self) -> Any:
        """Returns the computed array in float32, for its derivative; the source may differ."""
        if not is_inexact(self.array):
            return self.array
        x = lax.convert_element_type(self.array, FLOAT32)
        return gradient_of(x, self.source) if self.of_params else x

    def low(self) -> Any:
        """Returns the array in the dtype in which it is gathered."""
        dtype = None if self.layout is None else self.layout.dtype
        if dtype is None or dtype.itemsize >= self.array.dtype.itemsize:
            return self.array
        return lax.convert_element_type(self.array, dtype)

    def product_operand(self) -> tuple[Any, Any, Gather | None]:
        """Returns the array for a product, the source of its gradient, and its gather."""
        if self.layout is None:
            return self.array, self.source, None
        value = self.for_products() if self.layout.recomputed else self
        gather = Gather(*self.layout.ends, here=not value.is_gathered)
        return value.array, value.source, gather

    def for_products(self) -> "Value":
        """Returns the value with its array gathered; each product scatters its gradient."""
        if self.layout is None or self.is_gathered:
            return self
        gather = Gather(*self.layout.ends)
        whole = detach(lax.convert_element_type(gathered(self.low(), gather), self.array.dtype))
        return self._replace(array=whole, layout=self.layout._replace(gathered=True))

    def in_place(self) -> "Value":
        """Returns the gathered value; its gradient is summed whole, then scattered."""
        if self.layout is None:
            return self
        # Of a gradient that is only scattered, the partitioner splits the operation that makes it.
        source = gathered(self.source, Gather(*self.layout.ends))
        return self.for_products()._replace(source=source, layout=None)

    def whole(self) -> "Value":
        """Returns the gathered value for another program."""
        if self.layout is None:
            return self
        value = self.in_place()
        # The source begins as a copy, so that it need not be gathered as well: 4 bytes for 2.
        return value._replace(source=value.in_float32())

    def varying_as(self, like: Any) -> "Value":
        """Makes a param in a `shard_map` vary over the mesh axes over which an array varies."""
        if not self.of_params:
            return self
        array = varying_as(self.array, like)
        source = array if self.exact else varying_as(self.source, like)
        return self._replace(array=array, source=source)

    def broadcast(self, shape: tuple[int, ...]) -> "Value":
        """Broadcasts a param to this shape; returns other values unchanged."""
        if not self.of_params or self.array.shape == shape:
            return self
        dims = tuple(range(len(shape) - self.array.ndim, len(shape)))
        array = lax.broadcast_in_dim(self.array, shape, dims)
        source = array if self.exact else lax.broadcast_in_dim(self.source, shape, dims)
        return Value(array, source, None, max(self.origin, Origin.REPEATED))


# An exact value is one leaf, not the same array twice: loops would carry both.
jax.tree_util.register_pytree_node(
    Value,
    lambda value: (value[:2] if value.of_params and not value.exact else value[:1], value.traits),
    lambda traits, arrays: Value(arrays[0], arrays[-1] if traits.of_params else None, *traits[1:]),
)


def like_param(x: Any, origin: Origin = Origin.WEIGHT, layout: Layout | None = None) -> Value:
    """Wraps a value made of params; a 16-bit gradient is summed first, then rounded.

    It is rounded because the value was computed in 16 bits, and its derivative needs that dtype.
    """
    pair = (detach(x), float32_source(x)) if is_half(x) else (x, x)
    return Value(*pair, layout, origin)


def common_traits(alternatives: Sequence[Traits]) -> Traits:
    """Returns the traits of a value with one of several sets of traits."""
    params = [traits for traits in alternatives if traits.of_params]
    summed = any(traits.summed for traits in alternatives)
    others = (traits.origin for traits in alternatives if not traits.of_params)
    other = max(others, default=Origin.NUMBER)
    if other is Origin.ACTIVATION or not params:
        return Traits(exact=False, origin=other, summed=summed)
    layouts = {traits.layout for traits in alternatives}
    layout = layouts.pop() if len(layouts) == 1 else None
    # Data in one branch, and a weight in another: as a weight to which data was added.
    origins = [traits.origin for traits in params]
    return Traits(
        # A value that is gathered to match comes in two arrays.
        exact=all(traits.exact and traits.layout == layout for traits in alternatives),
        layout=layout,
        origin=max([*origins, Origin.ADDED] if other is Origin.DATA else origins),
        summed=summed,
    )


def with_traits(value: Value, traits: Traits) -> Value:
    """Converts a value to the traits that it shares with others."""
    if not traits.of_params:
        return Value(value.operand(), origin=traits.origin, summed=traits.summed)
    # Numbers or data, where another branch or turn has a weight.
    value = value if value.of_params else like_param(value.array)
    value = value if value.layout == traits.layout else value.in_place()
    if value.exact and not traits.exact:
        value = value._replace(array=detach(value.array), source=float32_source(value.source))
    if traits.exact and not value.exact:
        x = value.ungathered()
        value = value._replace(array=x, source=x)
    return value._replace(origin=traits.origin, summed=traits.summed)


def float32_source(x: Any) -> Any:
    return open_cast(x, FLOAT32) if is_short(x.dtype) else x


def is_short(dtype: Any) -> bool:
    """Whether a dtype is a real float of 32 bits or fewer; the extended dtypes of keys are not."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= FLOAT32.itemsize
