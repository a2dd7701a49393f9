"""A jaxpr in the form that jaxmp works on: operations over numbered values.

The programs inside of operations stay jaxprs. They are read when someone looks into them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._program.compat import consts_of, is_of_jax, is_plain_jit, open_jaxpr, sub_jaxprs
from jaxmp._program.op_classes import JITS
from jaxmp._program.wiring import Wiring, wiring_of


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One operation.

    Attributes:
      equation: its equation, whose params describe it.
      number: its number in the program.
      inputs: its operands: numbers of values, and literals.
      outputs: the numbers of the values that it makes.
      stack: its scopes within the program.
      traceback: the lines of the user's code for it.
      functions: the jitted functions that were inlined around it, innermost last.
    """

    equation: Any  # a core.JaxprEqn
    number: int
    inputs: tuple[int | core.Literal, ...]
    outputs: tuple[int, ...]
    stack: Any
    traceback: Any
    functions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.equation.primitive.name)

    @property
    def size(self) -> int:
        """How many operations of the program it stands for."""
        return 1

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    @property
    def in_avals(self) -> list[Any]:
        return [atom.aval for atom in self.equation.invars]

    @property
    def out_avals(self) -> list[Any]:
        return [atom.aval for atom in self.equation.outvars]

    @property
    def wiring(self) -> Wiring:
        """How the programs inside of it are connected to its operands and results."""
        return wiring_of(self.equation)


class Program(NamedTuple):
    """A jaxpr whose variables are numbers.

    Attributes:
      ops: its operations, in order.
      avals: the abstract value of each value, by number.
      inputs: the numbers of its arguments.
      consts: numbers of constants, and the constants.
      outputs: its results: numbers of values, and literals.
    """

    ops: tuple[Op, ...]
    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    consts: tuple[tuple[int, Any], ...]
    outputs: tuple[int | core.Literal, ...]


# The name of the jitted functions that equal parts of a program share (`parts`).
PART = "jaxmp_part"

# The program, and its name, that stands in for an equation; None leaves the equation.
Inline = Callable[[core.JaxprEqn], "tuple[Any, str] | None"]


def read(closed: Any, inline: Inline | None = None) -> Program:
    """Reads the program of a jaxpr.

    Args:
      closed: the jaxpr. An open one has no constants; without these it cannot run.
      inline: gives the program that is read in the place of an equation; None for none.
    """
    reader = _Reader(inline or (lambda equation: None))
    jaxpr = open_jaxpr(closed)
    env: dict[Any, Any] = {}
    inputs = tuple(reader.new(var, env) for var in jaxpr.invars)
    consts = reader.constants(closed, env)
    reader.read(jaxpr, env)
    outputs = tuple(reader.atom(atom, env) for atom in jaxpr.outvars)
    return Program(
        tuple(reader.ops), tuple(reader.avals), inputs, (*consts, *reader.consts), outputs
    )


def plain_call(equation: core.JaxprEqn) -> tuple[Any, str] | None:
    """Returns the program and the name of a jitted function without shardings, to read inline."""
    params = equation.params
    is_plain = equation.primitive.name in JITS and is_plain_jit(params)
    return (params["jaxpr"], params["name"]) if is_plain else None


def is_part_call(equation: core.JaxprEqn) -> bool:
    """Whether an equation calls a part of its program, which is read as if it stood there."""
    call = plain_call(equation)
    return call is not None and call[1] == PART


def numbers(atoms: Iterable[int | core.Literal]) -> Iterator[int]:
    """Returns the values among operands, without literals."""
    return (atom for atom in atoms if isinstance(atom, int))


class Memo:
    """Results that are made once for each key."""

    def __init__(self) -> None:
        self._results: dict[Any, tuple[Any, Any]] = {}

    def once(self, key: Any, alive: Any, make: Callable[[], Any]) -> Any:
        """Returns the result for a key; what the key names by its id is kept `alive`."""
        if key not in self._results:
            self._results[key] = make(), alive
        return self._results[key][0]


def equations_in(
    programs: Iterable[Any], enters: Callable[[core.JaxprEqn], bool] = lambda equation: True
) -> Iterator[Any]:
    """Yields the equations of jaxprs, and behind each those in its params, if it is entered."""
    for equation in (eqn for program in programs for eqn in open_jaxpr(program).eqns):
        yield equation
        if enters(equation):
            yield from equations_in(sub_jaxprs(equation), enters)


def without_dead_code(program: Program) -> Program:
    """Returns the program without operations that have no effects and no readers."""
    alive, ops = set(numbers(program.outputs)), []
    for op in reversed(program.ops):
        if op.equation.effects or not alive.isdisjoint(op.outputs):
            alive.update(numbers(op.inputs))
            ops.append(op)
    return program._replace(ops=tuple(reversed(ops)))


def last_reads(program: Any) -> list[set[int]]:
    """Returns, for each operation, the values of it that nothing reads after it."""
    read_later = set(numbers(program.outputs))
    last = []
    for op in reversed(program.ops):
        values = {*numbers(op.inputs), *op.outputs}
        last.append(values - read_later)
        read_later |= values
    return last[::-1]


class _Reader:
    def __init__(self, inline: Inline) -> None:
        self.inline = inline
        self.ops: list[Op] = []
        self.avals: list[Any] = []
        self.consts: list[tuple[int, Any]] = []

    def new(self, var: Any, env: dict[Any, Any]) -> int:
        number = env[var] = len(self.avals)
        self.avals.append(var.aval)
        return number

    def constants(self, closed: Any, env: dict[Any, Any]) -> list[tuple[int, Any]]:
        numbers = [self.new(var, env) for var in open_jaxpr(closed).constvars]
        return list(zip(numbers, consts_of(closed), strict=False))

    def atom(self, atom: Any, env: dict[Any, Any]) -> Any:
        return atom if isinstance(atom, core.Literal) else env[atom]

    def read(self, jaxpr: Any, env: dict[Any, Any], caller: Op | None = None) -> None:
        for equation in jaxpr.eqns:
            source, functions = equation.source_info, () if caller is None else caller.functions
            stack = source.name_stack if caller is None else caller.stack + source.name_stack
            # JAX traces a helper once for all its callers, with the lines of the first. All callers
            # of a part have the same lines.
            traceback = source.traceback if caller is None else caller.traceback or source.traceback
            inputs = tuple(self.atom(atom, env) for atom in equation.invars)
            is_part = is_part_call(equation)
            if inlined := plain_call(equation) if is_part else self.inline(equation):
                body, name = inlined
                of_jax = (f"jax.nn.{name}",) if is_of_jax(body, "nn/functions.py") else ()
                names = functions if is_part else (*functions, name, *of_jax)
                lines = (caller and caller.traceback) if is_part else traceback
                call = Op(equation, len(self.ops), inputs, (), stack, lines, names)
                inner: dict[Any, Any] = dict(zip(open_jaxpr(body).invars, inputs, strict=True))
                self.consts += self.constants(body, inner)
                self.read(open_jaxpr(body), inner, call)
                results = [self.atom(atom, inner) for atom in open_jaxpr(body).outvars]
                env.update(zip(equation.outvars, results, strict=True))
            else:
                outputs = tuple(self.new(var, env) for var in equation.outvars)
                number = len(self.ops)
                self.ops.append(Op(equation, number, inputs, outputs, stack, traceback, functions))
