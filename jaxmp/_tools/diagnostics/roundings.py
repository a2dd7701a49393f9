"""Runs a low-precision program in float32, with the roundings of each part switched on or off.

A module that is lowered alone by rules is not the module of the program in which everything is
low: its inputs are float32 then, and many of its operations stay in float32. So the program in
which everything is low runs here unchanged, forward and backward, but on float32 arrays. Where it
rounds, it rounds only if the part of the operation is switched on. The switches are arguments: one
compiled program measures all parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxmp._numerics.dtypes import is_narrow
from jaxmp._numerics.rounding import widen_rounded
from jaxmp._program import compat
from jaxmp._program.op_classes import (
    CLASSES,
    CONTRACTIONS,
    FOREIGN_CALLS,
    IDENTITIES,
    OPAQUE,
    OpClass,
)
from jaxmp._program.program import read
from jaxmp._program.scopes import names_in
from jaxmp._tools.diagnostics.rerun import Rerun
from jaxmp._tools.inspect.equations import Site
from jaxmp._tools.inspect.lines import scopes_of
from jaxmp._tools.inspect.upcasts import is_narrow_aval

_FLOAT32 = np.dtype(np.float32)
# By default TPUs round float32 operands to bfloat16: roundings that are switched off would stay.
_EXACT = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


class Switched(Rerun):
    """Runs a program in float32, with roundings where they are switched on.

    Args:
      on: whether the roundings of an operation are on, by its scopes: an array of one bool, or None
        for never.
    """

    def __init__(self, on: Callable[[tuple[str, ...]], Any]) -> None:
        super().__init__()
        self._on = on

    def constant(self, value: Any) -> Any:
        return _in_float32(value)

    def program_of_call(self, site: Site) -> Any:
        if site.name == "low_precision_product":
            return site.params["jaxpr"]
        return super().program_of_call(site)

    def whole(self, site: Site, operands: list[Any]) -> list[Any]:
        equation, avals = site.equation, site.out_avals
        if site.name in IDENTITIES:
            return operands[:1]
        if not any(map(is_narrow_aval, [*avals, *site.in_avals])):
            return compat.bind(equation, operands)
        # Kernels, and the bits of a number, are made for their dtypes: they run as they are.
        is_fixed = site.name in OPAQUE | FOREIGN_CALLS or site.name == "bitcast_convert_type"
        if is_fixed or CLASSES.get(site.name) is OpClass.CONTROL:
            as_traced = list(map(_in_traced_dtype, operands, site.in_avals))
            return list(map(_in_float32, compat.bind(equation, as_traced)))
        on = self._on(names_in(scopes_of(site)))
        if site.name == "mxfp8_encode":
            raise NotImplementedError(
                "sensitivity does not know products of blocks. Measure 'tensorwise' or 'rowwise', "
                "which round to the same format"
            )
        if site.name == "float8_encode":
            codes, scale, *others = compat.bind(equation, operands)
            exact_codes = jnp.asarray(operands[0] * scale, _FLOAT32)
            switched_codes = exact_codes
            if on is not None:
                switched_codes = jnp.where(on, widen_rounded(codes), exact_codes)
            return [switched_codes, scale, *others]
        exact: dict[str, Any] = {}
        if site.name in CONTRACTIONS:
            # A low part rounds what its products read, even if the part that computed it is not
            # low: rules do so too. Without this, `sensitivity` chose parts of a transformer that
            # made the error worse.
            exact = {"precision": _EXACT}
            operands = _rounded_as(operands, site.in_avals, on)
        results = compat.bind(equation, operands, **_params_in_float32(equation), **exact)
        return _rounded_as(results, avals, on)


def _in_float32(value: Any) -> Any:
    return lax.convert_element_type(value, _FLOAT32) if is_narrow_aval(value) else value


def _in_traced_dtype(value: Any, aval: Any) -> Any:
    return lax.convert_element_type(value, aval.dtype) if is_narrow_aval(aval) else value


def _params_in_float32(equation: core.JaxprEqn) -> dict[str, Any]:
    """Returns the params of an equation that name a narrow dtype, with float32 instead."""
    params = equation.params.items()
    narrow = [name for name, value in params if isinstance(value, np.dtype) and is_narrow(value)]
    # The program by which a scatter or a reduction joins two numbers has dtypes too.
    programs = map(_program_in_float32, compat.bodies_of(equation))
    return dict.fromkeys(narrow, _FLOAT32) | compat.params_with(equation, programs)


def _program_in_float32(program: Any) -> Any:
    def run(*arguments: Any) -> list[Any]:
        return Switched(lambda names: None).run(read(program), arguments)

    avals: list[Any] = [variable.aval for variable in compat.open_jaxpr(program).invars]
    return compat.trace(run, [x.update(dtype=_FLOAT32) if is_narrow_aval(x) else x for x in avals])


def _rounded_as(values: Sequence[Any], avals: Sequence[Any], on: Any) -> list[Any]:
    """Returns values with the roundings of the dtypes that the program has them in."""
    # None: no part has the scope, so that the compiled program needs no switch there.
    if on is None:
        return list(values)
    return [
        jnp.where(on, widen_rounded(_in_traced_dtype(x, aval)), x) if is_narrow_aval(aval) else x
        for x, aval in zip(values, avals, strict=True)
    ]


def switched(
    closed: Any, arrays: Sequence[Any], flags: Any, part_of: Callable[[tuple[str, ...]], int | None]
) -> list[Any]:
    """Runs a low program with the roundings of some parts; its results are in float32.

    Args:
      closed: the program in which everything is low.
      arrays: its arguments.
      flags: for each part, whether it rounds: an array of bools.
      part_of: the number of the part that a scope is in, or None.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16) + 1)(1.001)
    >>> for flag in (True, False):
    ...     print(switched(program, [1.001], jnp.array([flag]), lambda names: 0)[0])
    2.0
    2.001
    """

    def on(names: tuple[str, ...]) -> Any:
        number = part_of(names)
        return None if number is None else flags[number]

    return Switched(on).run(read(closed), list(map(_in_float32, arrays)))
