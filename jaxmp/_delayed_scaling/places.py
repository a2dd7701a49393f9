"""Runs a program with the scales of its float8 products given from outside.

A product with one scale for each array rounds each operand in the forward pass, and the cotangent
of its result. These places are numbered in the order of the program, through jit, checkpoint and
scan; one in a scan over layers stands for all layers, along a leading axis.

The largest magnitude of a cotangent comes out as the gradient of a zero, a probe: a function has no
other way to return what only its backward pass knows. JAX would add the gradients of a zero that is
used several times; here the batch of a `vmap` and the devices of a `shard_map` give the largest.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Float32

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.float8_codes import largest_magnitude, scale_of
from jaxmp._primitives.bilinear import RESULT, BilinearMap, Gathers, operand_roles
from jaxmp._primitives.float8_encode import encode_by_scale
from jaxmp._primitives.float8_product import Float8Map
from jaxmp._primitives.mixed_product import with_derivatives
from jaxmp._primitives.operands import ProductOperand, operands_of
from jaxmp._primitives.varying import varying_axes
from jaxmp._program import compat
from jaxmp._program.control_flow import bodies_to_extend, call_again, scan_again
from jaxmp._program.evaluate import Rules, evaluate
from jaxmp._program.program import Op, read
from jaxmp._program.wiring import loop_of


class DelayedMap(BilinearMap):
    """A product in float8, with the scale of its cotangent as one more operand.

    Attributes:
      current: the product with current scaling.
    """

    def __init__(self, current: Float8Map) -> None:
        super().__init__(
            current.primitive, current.compute, current.shapes, (), {}, current.gathers
        )
        self.current = current

    def multiplied(
        self,
        returned: int,
        operands: Sequence[ProductOperand],
        others: Sequence[Any],
        dtype: Any,
        *,
        exact: bool = False,
    ) -> Any:
        """Makes a role from the two others; see `BilinearMap`."""
        pairs = zip(operands, operand_roles(returned), strict=True)
        rounded = [self._rounded(x, role, returned, *others) for x, role in pairs]
        return self.current.multiplied(returned, rounded, (), dtype, exact=exact)

    def _rounded(
        self, operand: ProductOperand, role: int, returned: int, scale: Any
    ) -> ProductOperand:
        """Rounds the cotangent of the result; other operands are rounded by the product."""
        if role != RESULT or not operand.derivative:
            return operand
        recipe, axes = self.current.recipe, self.current.axes_of_scale(role, returned)
        params = {"dtype": recipe.gradient, "axes": axes, "power_of_two": recipe.power_of_two}
        coded, _ = encode_by_scale(operand.value, scale, **params)
        return ProductOperand(*coded, derivative=True)

    def batched(self, axes: Any, other_axes: Any, size: int) -> "DelayedMap":
        """Returns the map of `size` products, each with its scale."""
        del other_axes
        return delayed_map(self.current.batched(axes, (), size))

    def gathering(self, gathers: Gathers) -> "DelayedMap":
        """Returns the map of the same product of operands that are gathered first."""
        return delayed_map(self.current.gathering(gathers))


@functools.lru_cache(maxsize=1024)
def delayed_map(current: Any) -> DelayedMap:
    """Returns one object for equal products, so that jit caches find it."""
    return DelayedMap(current)


def encoded_by(
    equation: core.JaxprEqn, x: Any, expected: Float32[Array, ""]
) -> tuple[list[Any], Float32[Array, ""]]:
    """Rounds an operand again, by a scale that is known before.

    Args:
      equation: the equation that rounds it by current magnitudes.
      x: the operand.
      expected: the largest magnitude to expect.

    Returns:
      The codes and the scales, and the largest magnitude that is there.
    """
    params = equation.params
    scale = scale_expecting(expected, params["dtype"], params["power_of_two"])
    coded, largest = encode_by_scale(x, scale, **params)
    return list(coded), jnp.max(largest)


def attached_by(equation: core.JaxprEqn, values: list[Any], expected: Float32[Array, ""]) -> Any:
    """Attaches the derivatives of a product again, its cotangent to be rounded by a known scale.

    Args:
      equation: the equation that attaches them.
      values: its operands.
      expected: the largest magnitude to expect of the cotangent.

    Returns:
      The result of the product.
    """
    form = equation.params["form"]
    operands, _ = operands_of(values[1:], equation.params["kept"])
    scale = scale_expecting(expected, form.recipe.gradient, form.recipe.power_of_two)
    return with_derivatives(values[0], delayed_map(form), operands, [scale])


def scale_expecting(
    expected: Float32[Array, ""], dtype: DType, power_of_two: bool
) -> Float32[Array, ""]:
    """Returns the scale for a magnitude to expect; 1 for zero, which says nothing.

    >>> scale_expecting(jnp.float32(0), jnp.dtype("float8_e4m3fn"), True)
    Array(1., dtype=float32)
    """
    scale = scale_of(expected, dtype, power_of_two=power_of_two)
    return jnp.where(expected == 0, jnp.float32(1), scale)


# Operands: a value, and zeros. The identity on the value.
_probed_p = Primitive("probed")


def probed(value: Float[Array, "..."], probe: Float32[Array, "..."]) -> Float[Array, "..."]:
    """Returns the value; the gradient of the probe is the largest magnitude of its cotangent.

    Args:
      value: any array.
      probe: a float32 zero for this one use, or zeros for each place along the first axes of the
        value.

    Returns:
      The value.

    Raises:
      TypeError: for a probe of another shape.

    >>> import jax
    >>> f = lambda x, probe: jnp.sum(probed(x, probe) * jnp.float32([1, -5, 2]))
    >>> jax.grad(f, argnums=1)(jnp.ones(3), jnp.float32(0))
    Array(5., dtype=float32)
    """
    if value.shape[: probe.ndim] != probe.shape:
        raise TypeError(f"a probe of shape {probe.shape} does not fit a value of {value.shape}")
    return _probed_p.bind(value, probe)


def largest_over_devices(largest: Any, like: Any) -> Any:
    """Returns the maximum over the mesh axes of a `shard_map` that another array does not vary on.

    Args:
      largest: the largest magnitude on each device.
      like: the array that it is kept with.
    """
    axes = varying_axes(largest) - varying_axes(like)
    return lax.pmax(largest, tuple(sorted(axes))) if axes else largest


def _probed_jvp(primals: Any, tangents: Any) -> Any:
    out = _probed_p.bind(*primals)
    along, along_probe = tangents
    if isinstance(along_probe, ad.Zero):
        return out, along
    return out, _probed_p.bind(ad.instantiate_zeros(along), along_probe)


def _probed_transpose(ct: Any, value: Any, probe: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None, None]
    if not ad.is_undefined_primal(probe):
        return [ct, None]
    shown = jnp.abs(ct).astype(jnp.float32)
    largest = jnp.max(shown, axis=tuple(range(probe.aval.ndim, ct.ndim)), initial=0)
    found = largest_over_devices(largest, probe.aval)
    return [ct if ad.is_undefined_primal(value) else None, found]


def _probed_batch(args: Any, axes: Any) -> Any:
    (value, probe), (axis, axis_of_probe) = args, axes
    size = next(x.shape[i] for x, i in zip(args, axes, strict=True) if i is not None)
    if axis_of_probe is None:  # one probe for the batch; places of its own come first
        return _probed_p.bind(jnp.moveaxis(value, axis, probe.ndim), probe), probe.ndim
    moved = [batching.bdim_at_front(x, i, size) for x, i in zip(args, axes, strict=True)]
    return _probed_p.bind(*moved), 0


_probed_p.def_impl(lambda value, probe: value)
_probed_p.def_abstract_eval(lambda value, probe: value)
ad.primitive_jvps[_probed_p] = _probed_jvp
ad.primitive_transposes[_probed_p] = _probed_transpose
batching.primitive_batchers[_probed_p] = _probed_batch
mlir.register_lowering(_probed_p, lambda ctx, value, probe: [value])


class Places(NamedTuple):
    """The places of a program where it rounds to float8, each as the lengths of the scans around.

    Attributes:
      forward: where operands are rounded.
      backward: where cotangents are.
    """

    forward: list[tuple[int, ...]]
    backward: list[tuple[int, ...]]


class Given(NamedTuple):
    """What is given for the places of a program, in their order.

    Attributes:
      forward: the largest magnitudes to expect of operands; None for those that are there.
      backward: the same of cotangents.
      probes: zeros, whose gradients are the largest magnitudes of the cotangents.
    """

    forward: list[Any]
    backward: list[Any]
    probes: list[Any]


def places_of(equations: Sequence[core.JaxprEqn]) -> Places:
    """Returns the places in equations, and in the programs that can run again inside of them."""
    places, codes = Places([], []), _codes_of_products(equations)
    for equation in equations:
        counts = _own_places(equation, codes)
        for into, count in zip(places, counts, strict=True):
            into += [()] * count
        loop = loop_of(equation)
        stack = () if loop is None else (loop.turns,)
        for body in bodies_to_extend(equation):
            inside = places_of(compat.open_jaxpr(body).eqns)
            for into, inner in zip(places, inside, strict=True):
                into += [(*stack, *place) for place in inner]
    return places


def left_out(equations: Sequence[core.JaxprEqn]) -> Iterator[str]:
    """Yields the operations with products inside that cannot run again with given scales."""
    for equation in equations:
        again = bodies_to_extend(equation)
        for body in compat.bodies_of(equation):
            inner = compat.open_jaxpr(body).eqns
            if again:
                yield from left_out(inner)
            elif any(places_of(inner)) or [*left_out(inner)]:
                yield equation.primitive.name


def run_with_scales(
    closed: Any, arguments: Sequence[Any], given: Given
) -> tuple[list[Any], list[Any]]:
    """Runs a program, with what is given for its places.

    Args:
      closed: the program, closed or open.
      arguments: its arguments.
      given: what is given.

    Returns:
      Its results, and the largest magnitudes of what it rounded in the forward pass.
    """
    rules = _WithScales(given, _codes_of_products(compat.open_jaxpr(closed).eqns))
    return evaluate(read(closed), arguments, rules), rules.seen


# The results of an equation, and what was seen in it.
_Both = tuple[list[Any], list[Any]]


class _WithScales(Rules[Any]):
    """One run of a program: which places are done, and what was seen there."""

    def __init__(self, given: Given, codes: frozenset[Any]) -> None:
        self.left = given
        self.codes = codes
        self.seen: list[Any] = []

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        equation = op.equation
        forward, backward = _own_places(equation, self.codes)
        rule: Callable[[core.JaxprEqn, list[Any], Given], _Both]
        if forward or backward:
            rule = _round if forward else _attach
        elif any(inside := places_of([equation])):
            forward, backward = map(len, inside)
            rule = _run_again
        else:
            return compat.bind(equation, operands)
        pairs = list(zip(self.left, (forward, backward, backward), strict=True))
        given = Given(*(each[:count] for each, count in pairs))
        self.left = Given(*(each[count:] for each, count in pairs))
        results, seen = rule(equation, operands, given)
        self.seen += seen
        return results


def _codes_of_products(equations: Sequence[core.JaxprEqn]) -> frozenset[Any]:
    """Returns the variables that hold the codes of operands, for products with places."""
    return frozenset(x for each in equations if _attaches(each) for x in each.invars[1:3])


def _own_places(equation: core.JaxprEqn, codes: frozenset[Any]) -> tuple[int, int]:
    """Returns how many operands an equation itself rounds, and how many cotangents."""
    rounds = equation.primitive.name == "float8_encode" and equation.outvars[0] in codes
    return int(rounds), int(_attaches(equation))


def _attaches(equation: core.JaxprEqn) -> bool:
    """Whether an equation attaches the derivatives of a product with one scale for each array."""
    form = equation.params.get("form") if equation.primitive.name == "float32_gradient" else None
    return isinstance(form, Float8Map) and form.recipe.keeps_codes


def _round(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (x,), (expected,) = values, given.forward
    if expected is None:
        seen = largest_magnitude(x, tuple(range(x.ndim))).reshape(())
        return compat.bind(equation, values), [seen]
    coded, seen = encoded_by(equation, x, expected)
    return coded, [largest_over_devices(seen, expected)]


def _attach(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (expected,), (probe,) = given.backward, given.probes
    if expected is None:
        (out,) = compat.bind(equation, values)
    else:
        out = attached_by(equation, values, expected)
    return [out if probe is None else probed(out, probe)], []


def _run_again(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (body,) = compat.bodies_of(equation)

    def function(values: Sequence[Any], given: Given) -> _Both:
        return run_with_scales(body, values, given)

    if loop_of(equation) is not None:
        return scan_again(equation, values, function, given)
    both: _Both = call_again(equation, values, given, function)
    return both
