"""A hash of what a program computes, whatever the order of its operations and its plain calls.

A result is known by its operation and by what this reads. So two programs have the same hash if
each of their results is made by the same operations of the same values. How often an operation
stands is not seen, nor in which order JAX adds up the gradients of a value.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.op_classes import CHECKPOINTS
from jaxmp._program.program import plain_call
from jaxmp._program.wiring import Wiring, loop_of


def hash_of(closed: core.ClosedJaxpr) -> str:
    """The hash of all results of a program, with its plain calls in place of their callers."""
    arguments = [_hash("argument", i, str(var.aval)) for i, var in enumerate(closed.jaxpr.invars)]
    return _hash(_results(closed, arguments, {}))


def _hash(*parts: Any) -> str:
    return hashlib.md5(repr(parts).encode()).hexdigest()


# The terms of sums of gradients.
_Terms = dict[str, tuple[str, ...]]


def _results(program: Any, arguments: Sequence[str], terms: _Terms) -> list[str]:
    jaxpr = compat.open_jaxpr(program)
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    consts = zip(jaxpr.constvars, compat.consts_of(program), strict=True)
    known.update((var, _hash("constant", _array(value))) for var, value in consts)

    def of(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return _hash("literal", str(atom.aval), _array(atom.val))
        return known[atom]

    for number, equation in enumerate(jaxpr.eqns):
        operands = list(map(of, equation.invars))
        if equation.primitive.name == "add_any":
            added = tuple(sorted(x for each in operands for x in terms.get(each, (each,))))
            results = [_hash("sum", added)]
            terms[results[0]] = added
        elif call := plain_call(equation):
            results = _results(call[0], operands, terms)
        elif (loop := loop_of(equation)) is not None:
            results = _of_scan(equation, loop, operands)
        elif equation.primitive.name in CHECKPOINTS:
            (body,), kept = compat.bodies_of(equation), _value(equation.params["policy"])
            results = [
                _hash(kept, x) for x in _results(body, [_hash(kept, x) for x in operands], {})
            ]
        else:
            types = [str(var.aval) for var in equation.outvars]
            effect = number if equation.effects else None
            text = _hash(equation.primitive.name, _params(equation), operands, types, effect)
            results = [_hash(text, i) for i in range(len(types))]
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _of_scan(equation: core.JaxprEqn, loop: Wiring, operands: list[str]) -> list[str]:
    """The order of a scan's constants, carries and stacked results says nothing."""
    kinds = [(i in loop.carry, i in loop.slices) for i in range(len(operands))]
    inside = [_hash(kind, x) for kind, x in zip(kinds, operands, strict=True)]
    (body,), carry = compat.bodies_of(equation), loop.carry
    results = _results(body, inside, {})
    ends = list(zip(inside[carry.start : carry.stop], results, strict=False))
    turns = _hash(loop.turns, loop.reverse, sorted(ends))
    return [_hash(turns, *x) for x in (*ends, *((x,) for x in results[len(carry) :]))]


def _params(equation: core.JaxprEqn) -> list[Any]:
    return [(name, _value(value)) for name, value in sorted(equation.params.items())]


def _value(value: Any) -> Any:
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        invars = compat.open_jaxpr(value).invars
        arguments = [_hash("argument", i, str(var.aval)) for i, var in enumerate(invars)]
        return _results(value, arguments, {})
    if isinstance(value, list | tuple):
        return list(map(_value, value))
    # The functions that make derivatives are new objects in each trace.
    return "a function" if callable(value) else re.sub(r"0x[0-9a-f]+", "", str(value))


def _array(value: Any) -> Any:
    try:
        return str(np.asarray(value).dtype), np.asarray(value).tobytes()
    except TypeError:  # such as a random key
        return str(value)
