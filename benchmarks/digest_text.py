"""A program as a text for comparing two versions of jaxmp, and its counts.

The text contains only what runs: no addresses, no paths or lines of sources, no names of Python
functions, no scopes. A value is named after the operation that makes it, and numbered among those
of the same operation in its body. So one more cast renames other casts, and no other value.
"""

import collections
import enum
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp._program.flops import product_flops, programs_inside

# What JAX keeps for messages and tools.
_NAMES = ("name", "debug_info", "fun_name")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SOURCE = re.compile(r"[^\s'\"(]*\.py:\d+")
_FEW = 16  # numbers of a constant that are written out


def text_of(closed: core.ClosedJaxpr) -> str:
    """The text of a program; equal for equal programs, in any process."""
    return "\n".join(_body(closed)) + "\n"


def sha_of(text: str) -> str:
    """The hash of a text, short enough for a table."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def equations_of(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """Every equation of a program, and of the programs inside of it."""
    for equation in _open(jaxpr).eqns:
        yield equation
        for inner in _programs(equation.params.values()):
            yield from equations_of(inner)


def count_casts(jaxpr: Any) -> int:
    """How many equations change a dtype."""
    casts = (x for x in equations_of(jaxpr) if x.primitive.name == "convert_element_type")
    return sum(x.invars[0].aval.dtype != x.outvars[0].aval.dtype for x in casts)  # type: ignore[attr-defined]


def product_flops_by_dtype(jaxpr: Any, times: int = 1) -> collections.Counter[str]:
    """FLOPs of products by the dtypes of their operands; of a `cond`, of all branches."""
    found: collections.Counter[str] = collections.Counter()
    for equation in _open(jaxpr).eqns:
        if flops := product_flops(equation):
            dtypes = dict.fromkeys(str(x.aval.dtype) for x in equation.invars[:2])  # type: ignore[attr-defined]
            found["+".join(dtypes)] += times * flops
        runs = times * equation.params.get("length", 1) if _name(equation) == "scan" else times
        for inner in programs_inside(equation):
            found.update(product_flops_by_dtype(inner, runs))
    return found


def _name(equation: core.JaxprEqn) -> str:
    return equation.primitive.name


def _open(jaxpr: Any) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _programs(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _programs(value)
        elif isinstance(value, Mapping):
            yield from _programs(value.values())


def _body(jaxpr: Any) -> Iterator[str]:
    names = _Names()
    opened, consts = _open(jaxpr), getattr(jaxpr, "consts", ())
    for variable, value in zip(opened.constvars, consts, strict=False):
        yield f"const {names.new(variable, 'const')} = {_array(value)}"
    for variable in opened.invars:
        yield f"given {names.new(variable, 'in')}"
    for equation in opened.eqns:
        yield from _equation(equation, names)
    yield " ".join(["return", *map(names.of, opened.outvars)])


def _equation(equation: core.JaxprEqn, names: "_Names") -> Iterator[str]:
    operands = [names.of(x) for x in equation.invars]
    inside = {k: v for k, v in equation.params.items() if any(True for _ in _programs([v]))}
    # The name of a function that is called is for people, unlike that of a value that is kept.
    left_out = (*inside, *_NAMES) if inside else ()
    params = {k: v for k, v in equation.params.items() if k not in left_out}
    written = ", ".join(f"{k}={_value(v)}" for k, v in sorted(params.items()))
    results = ", ".join(names.results(equation))
    yield f"{results} = {_name(equation)}[{written}] {' '.join(operands)}".rstrip()
    for key, value in sorted(inside.items()):
        for i, program in enumerate(_programs([value])):
            yield f"  {key} {i}:"
            yield from ("    " + line for line in _body(program))


class _Names:
    """The names of the values in one body."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def new(self, variable: Any, kind: str) -> str:
        """A name of this kind for a value, with its type."""
        self._names[variable] = f"{kind}{self._counts[kind]}"
        self._counts[kind] += 1
        return f"{self._names[variable]}:{_type(variable.aval)}"

    def results(self, equation: core.JaxprEqn) -> list[str]:
        """Names for the results of an equation."""
        return [self.new(x, _name(equation)) for x in equation.outvars]

    def of(self, atom: Any) -> str:
        """The name of a value, or a literal."""
        if isinstance(atom, core.Literal):
            return f"{_value(atom.val)}:{_type(atom.aval)}"
        return self._names[atom]


def _type(aval: Any) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return _plain(aval.str_short()) + weak


def _array(value: Any) -> str:
    """A constant: its numbers if they are few, else their hash if they are the same everywhere."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    numbers = np.asarray(value)
    if not numbers.ndim:
        return f"{numbers.item():.9g}" if numbers.dtype.kind in "fV" else str(numbers.item())
    shape = f"{numbers.dtype}[{','.join(map(str, numbers.shape))}]"
    if numbers.dtype.kind in "biu":
        return f"{shape} {_few(numbers.tolist() if numbers.size <= _FEW else numbers.tobytes())}"
    # The last digits of floats that were computed depend on the machine.
    return f"{shape} {[f'{x:.5g}' for x in numbers.ravel()[:_FEW].astype(float)]}"


def _few(value: Any) -> str:
    return hashlib.sha256(value).hexdigest()[:8] if isinstance(value, bytes) else str(value)


def _plain(text: str) -> str:
    return _SOURCE.sub("<source>", _ADDRESS.sub("", text))


def _many(values: Iterable[str], brackets: str = "()") -> str:
    return brackets[0] + ", ".join(values) + brackets[1]


# How a param is written, by its class; the first that fits. Sets have no order from run to run.
_WRITERS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    ((np.ndarray, jax.Array), _array),
    ((jax.sharding.Mesh, jax.sharding.AbstractMesh), repr),  # which can be called, as decorators
    (np.dtype, lambda x: x.name),
    (enum.Enum, str),
    (type, lambda x: x.__name__),
    ((set, frozenset), lambda x: _many(sorted(map(_value, x)), "{}")),
    (Mapping, lambda x: _many((f"{_value(k)}: {_value(x[k])}" for k in sorted(x, key=str)), "{}")),
    ((tuple, list), lambda x: _many(map(_value, x))),
)


def _value(value: Any) -> str:
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value)
    is_function = callable(value) or "WrappedFun" in type(value).__name__
    return "<function>" if is_function else _plain(repr(value))
