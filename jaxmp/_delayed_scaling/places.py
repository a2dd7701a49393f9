"""Runs a program again, with the scales of its float8 products as further inputs.

A product with one scale for each array rounds each operand in the forward pass, and the cotangent
of its result. These places are numbered in the order of the program, through jit, checkpoint and
scan; one in a scan over layers stands for all layers, along a leading axis.

The largest magnitude of a cotangent comes out as the gradient of a zero, a probe: a function has no
other way to return a number that only its backward pass knows.
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
        recipe, (scale,) = self.current.recipe, others
        operands = list(operands)
        for i, role in enumerate(operand_roles(returned)):
            # The cotangent alone has a known scale here: other operands were rounded in the forward
            # pass, and tangents have no state.
            is_rounded = self.current.multiplies_codes(returned)
            if role == RESULT and operands[i].derivative and is_rounded:
                axes = self.current.axes_of_scale(role, returned)
                params = {"dtype": recipe.gradient, "axes": axes}
                params["power_of_two"] = recipe.power_of_two
                codes, _ = encode_by_scale(operands[i].value, scale, **params)
                operands[i] = ProductOperand(*codes, derivative=True)
        return self.current.multiplied(returned, operands, (), dtype, exact=exact)

    def batched(self, axes: Any, other_axes: Any, size: int) -> "DelayedMap":
        """Returns the map of `size` products, each with its scale."""
        del other_axes
        return delayed_map(self.current.batched(axes, (), size))

    def gathering(self, gathers: Gathers) -> "DelayedMap":
        """Returns the map of the same product of operands that are gathered first."""
        return delayed_map(self.current.gathering(gathers))


@functools.lru_cache(maxsize=1024)
def delayed_map(current: Any) -> DelayedMap:
    # One object for equal products: maps compare by identity, in jit caches too.
    return DelayedMap(current)


def delayed_scale(
    expected: Float32[Array, ""], dtype: DType, power_of_two: bool
) -> Float32[Array, ""]:
    """Returns the scale for a magnitude to expect; 1 for zero.

    >>> delayed_scale(jnp.float32(0), jnp.dtype("float8_e4m3fn"), True)
    Array(1., dtype=float32)
    """
    scale = scale_of(expected, dtype, power_of_two=power_of_two)
    # A history of zeros says nothing, and the largest scale would clip all values to 1e-12.
    return jnp.where(expected == 0, jnp.float32(1), scale)


# Operands: a value, and zeros. The identity on the value. JAX would add the gradients of a zero
# that is used several times: 1 and 5 give 6. So each use has its own, and the rules for the batch
# of a vmap and the devices of a shard_map take the largest.
_probe_p = Primitive("probed")


def attach_probe(value: Float[Array, "..."], probe: Float32[Array, "..."]) -> Float[Array, "..."]:
    """Returns the value; the gradient of the probe is the largest magnitude of its cotangent.

    The probe is a float32 zero for this one use, or zeros for each place along the first axes of
    the value.

    Raises:
      TypeError: for a probe of another shape.

    >>> import jax
    >>> f = lambda x, probe: jnp.sum(attach_probe(x, probe) * jnp.float32([1, -5, 2]))
    >>> jax.grad(f, argnums=1)(jnp.ones(3), jnp.float32(0))
    Array(5., dtype=float32)
    """
    # JAX's vmap and scan put the axes of places in front.
    if value.shape[: probe.ndim] != probe.shape:
        raise TypeError(f"a probe of shape {probe.shape} does not fit a value of {value.shape}")
    return _probe_p.bind(value, probe)


def largest_over_devices(largest: Any, like: Any) -> Any:
    """Returns the maximum over the axes of a `shard_map` that another array does not vary on."""
    axes = varying_axes(largest) - varying_axes(like)
    return lax.pmax(largest, tuple(sorted(axes))) if axes else largest


def _probe_jvp(primals: Any, tangents: Any) -> Any:
    out = _probe_p.bind(*primals)
    tangent, probe_tangent = tangents
    # Without a probe to differentiate, the derivative is that of the identity.
    if isinstance(probe_tangent, ad.Zero):
        return out, tangent
    return out, _probe_p.bind(ad.instantiate_zeros(tangent), probe_tangent)


def _probe_transpose(ct: Any, value: Any, probe: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None, None]
    if not ad.is_undefined_primal(probe):
        return [ct, None]
    magnitudes = jnp.abs(ct).astype(jnp.float32)
    largest = jnp.max(magnitudes, axis=tuple(range(probe.aval.ndim, ct.ndim)), initial=0)
    largest = largest_over_devices(largest, probe.aval)
    return [ct if ad.is_undefined_primal(value) else None, largest]


def _probe_batch(args: Any, axes: Any) -> Any:
    (value, probe), (axis, probe_axis) = args, axes
    size = next(x.shape[i] for x, i in zip(args, axes, strict=True) if i is not None)
    # One probe for the batch: it gets the largest of the rows. The axes of its places come first.
    if probe_axis is None:
        return _probe_p.bind(jnp.moveaxis(value, axis, probe.ndim), probe), probe.ndim
    args = [batching.bdim_at_front(x, i, size) for x, i in zip(args, axes, strict=True)]
    return _probe_p.bind(*args), 0


_probe_p.def_impl(lambda value, probe: value)
_probe_p.def_abstract_eval(lambda value, probe: value)
ad.primitive_jvps[_probe_p] = _probe_jvp
ad.primitive_transposes[_probe_p] = _probe_transpose
batching.primitive_batchers[_probe_p] = _probe_batch
mlir.register_lowering(_probe_p, lambda ctx, value, probe: [value])


class Places(NamedTuple):
    """The places of a program where it rounds to float8, each as the lengths of the scans around.

    Attributes:
      forward: where operands are rounded.
      backward: where cotangents are.
    """

    forward: list[tuple[int, ...]]
    backward: list[tuple[int, ...]]


class PlaceValues(NamedTuple):
    """Values for the places of a program, in their order.

    Attributes:
      forward: the largest magnitudes to expect of operands; None scales by the current ones.
      backward: the same of cotangents.
      probes: zeros, whose gradients are the largest magnitudes of the cotangents.
    """

    forward: list[Any]
    backward: list[Any]
    probes: list[Any]


def places_of(equations: Sequence[core.JaxprEqn]) -> Places:
    """Returns the places in equations, and in the programs that can run again inside of them."""
    places, operands = Places([], []), _product_operands(equations)
    for equation in equations:
        counts = _own_counts(equation, operands)
        for into, count in zip(places, counts, strict=True):
            into += [()] * count
        loop = loop_of(equation)
        # One equation in a scan over layers stands for all layers: its magnitudes are stacked.
        stack = () if loop is None else (loop.turns,)
        for body in bodies_to_extend(equation):
            inside = places_of(compat.open_jaxpr(body).eqns)
            for into, inner in zip(places, inside, strict=True):
                into += [(*stack, *place) for place in inner]
    return places


def operations_not_entered(equations: Sequence[core.JaxprEqn]) -> Iterator[str]:
    """Yields the operations whose products scale by current magnitudes: no place is in them."""
    for equation in equations:
        is_entered = bool(bodies_to_extend(equation))
        for body in compat.bodies_of(equation):
            inner = compat.open_jaxpr(body).eqns
            if is_entered:
                yield from operations_not_entered(inner)
            elif any(places_of(inner)) or [*operations_not_entered(inner)]:
                yield equation.primitive.name


def run_with_scales(
    closed: Any, arguments: Sequence[Any], values: PlaceValues
) -> tuple[list[Any], list[Any]]:
    """Runs a program, closed or open, with values for its places.

    Returns:
      Its results, and the largest magnitudes of the operands that it rounds in the forward pass.
    """
    rules = _ScaledRun(values, _product_operands(compat.open_jaxpr(closed).eqns))
    return evaluate(read(closed), arguments, rules), rules.magnitudes


# The results of an equation, and the magnitudes of the operands that it rounds.
_Outputs = tuple[list[Any], list[Any]]


class _ScaledRun(Rules[Any]):
    """One run of a program: the values for the places to come, and the magnitudes so far."""

    def __init__(self, values: PlaceValues, product_operands: frozenset[Any]) -> None:
        self.values = values
        self.product_operands = product_operands
        self.magnitudes: list[Any] = []

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        equation = op.equation
        forward, backward = _own_counts(equation, self.product_operands)
        rule: Callable[[core.JaxprEqn, list[Any], PlaceValues], _Outputs]
        if forward or backward:
            rule = _round if forward else _attach
        elif any(inside := places_of([equation])):
            forward, backward = map(len, inside)
            rule = _run_body
        else:
            return compat.bind(equation, operands)
        # Values are in the order of the program: an equation takes the first ones that are left.
        pairs = list(zip(self.values, (forward, backward, backward), strict=True))
        values = PlaceValues(*(row[:count] for row, count in pairs))
        self.values = PlaceValues(*(row[count:] for row, count in pairs))
        results, magnitudes = rule(equation, operands, values)
        self.magnitudes += magnitudes
        return results


def _product_operands(equations: Sequence[core.JaxprEqn]) -> frozenset[Any]:
    """Returns the variables that hold operands of products with places: codes, or wide arrays."""
    # The first operand of such an equation is the product, and the next two are those of it.
    products = [equation for equation in equations if _is_product(equation)]
    return frozenset(x for product in products for x in product.invars[1:3])


def _own_counts(equation: core.JaxprEqn, operands: frozenset[Any]) -> tuple[int, int]:
    """Returns how many operands an equation itself rounds, and how many cotangents."""
    rounds = False
    if equation.primitive.name == "float8_encode":
        x, codes = equation.invars[0], equation.outvars[0]
        # An array that is kept wide may be rounded by rows, too, for a product by another recipe.
        has_one_scale = len(equation.params["axes"]) == len(codes.aval.shape)  # type: ignore[attr-defined]
        is_kept_wide = isinstance(x, core.Var) and x in operands
        rounds = codes in operands or (is_kept_wide and has_one_scale)
    return int(rounds), int(_is_product(equation))


def _is_product(equation: core.JaxprEqn) -> bool:
    """Whether an equation attaches the derivatives of a product with one scale for each array."""
    form = equation.params.get("form") if equation.primitive.name == "float32_gradient" else None
    # Products with scales for rows go by current magnitudes.
    return isinstance(form, Float8Map) and form.recipe.granularity == "tensor"


def _round(equation: core.JaxprEqn, operands: list[Any], values: PlaceValues) -> _Outputs:
    (x,), (expected,), params = operands, values.forward, equation.params
    if expected is None:
        current = largest_magnitude(x, tuple(range(x.ndim))).reshape(())
        return compat.bind(equation, operands), [current]
    scale = delayed_scale(expected, params["dtype"], params["power_of_two"])
    codes, largest = encode_by_scale(x, scale, **params)
    return list(codes), [largest_over_devices(jnp.max(largest), expected)]


def _attach(equation: core.JaxprEqn, operands: list[Any], values: PlaceValues) -> _Outputs:
    (expected,), (probe,), form = values.backward, values.probes, equation.params["form"]
    if expected is None:
        (out,) = compat.bind(equation, operands)
    else:
        factors, _ = operands_of(operands[1:], equation.params["kept"])
        scale = delayed_scale(expected, form.recipe.gradient, form.recipe.power_of_two)
        out = with_derivatives(operands[0], delayed_map(form), factors, [scale])
    return [out if probe is None else attach_probe(out, probe)], []


def _run_body(equation: core.JaxprEqn, operands: list[Any], values: PlaceValues) -> _Outputs:
    # A jit, a checkpoint or a scan: each has one program.
    (body,) = compat.bodies_of(equation)

    def function(operands: Sequence[Any], values: PlaceValues) -> _Outputs:
        return run_with_scales(body, operands, values)

    # The turns of a scan get slices of the values, and return stacked magnitudes.
    if loop_of(equation) is not None:
        return scan_again(equation, operands, function, values)
    outputs: _Outputs = call_again(equation, operands, values, function)
    return outputs
