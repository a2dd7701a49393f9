"""Runs a program one operation after the other, so that every value can be looked at.

A compiled program hides its values: they are fused, wider than they are written, or gone. Here each
operation runs alone, in the dtypes of the program. Loops turn in Python, and of a branch the one
that is taken runs. A `shard_map` runs too: each local value is one array with an axis of devices.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._jaxpr import compat
from jaxmp._jaxpr.mesh_axes import automatic_devices, on_automatic_mesh
from jaxmp._jaxpr.op_classes import CLASSES, LAYINGS, OpClass


class Place(NamedTuple):
    """The place of an operation in a running program.

    Attributes:
      equations: the operation, and those around it, innermost first.
      turns: the numbers of the turns of the loops around it, outermost first.
      mapped: whether it is in a `shard_map`, where arrays have a first axis of devices here.
    """

    equations: tuple[core.JaxprEqn, ...]
    turns: tuple[int, ...]
    mapped: bool = False


_OUTSIDE = Place((), ())


@dataclasses.dataclass(frozen=True, slots=True)
class RunValue:
    """An array of a running program, and what is known of it.

    Attributes:
      array: the array. In a `shard_map`, local arrays one behind the other, along a first axis.
      note: what the watcher said when it was made, or the notes of what it was made of.
    """

    array: Any
    note: Any


# Called with the place of each operation, its operands and its results; returns the notes of the
# results.
Watcher = Callable[[Place, list[RunValue], list[Any]], list[Any]]
# Returns the note of an array from those of its parts, or from that of the array it is a part of.
Join = Callable[[Any, list[Any]], Any]


class OneByOne:
    """Runs programs one operation after the other.

    Args:
      watch: sees each operation that contains no program.
      join: returns the note of an array that a loop stacks, from those of its parts, and of what
        it slices, from that of the whole.
    """

    def __init__(self, watch: Watcher, join: Join) -> None:
        self._watch, self._join = watch, join

    def run(
        self,
        program: Any,
        args: Sequence[RunValue],
        outer: Place = _OUTSIDE,
        over: "Devices | None" = None,
    ) -> list[RunValue]:
        """Runs a program and returns its results.

        Args:
          program: a jaxpr, closed or open.
          args: its arguments.
          outer: the operations that it is in.
          over: the devices over which it is mapped, in a `shard_map`.
        """
        jaxpr = compat.open_jaxpr(program)
        last = _last_reads(jaxpr)
        place = over.spread if over else _as_it_is
        # Constants may have been made on explicit axes, outside of the program.
        consts = [RunValue(place(on_automatic_mesh(x)), None) for x in compat.consts_of(program)]
        env: dict[Any, RunValue] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> RunValue:
            if isinstance(atom, core.Literal):
                return RunValue(place(compat.number(atom)), None)
            return env[atom]

        for number, equation in enumerate(jaxpr.eqns):
            here = outer._replace(equations=(equation, *outer.equations))
            operands = [read(atom) for atom in equation.invars]
            env.update(zip(equation.outvars, self._equation(here, operands, over), strict=True))
            for variable in last[number]:
                env.pop(variable, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, place: Place, operands: list[RunValue], over: "Devices | None"
    ) -> list[RunValue]:
        equation = place.equations[0]
        name = equation.primitive.name
        if name in _LOOPS_AND_BRANCHES:
            return _LOOPS_AND_BRANCHES[name](self, place, operands, over)
        if name == "shard_map" and over is None:
            return self._shard_map(place, operands)
        if (
            name != "shard_map"
            and CLASSES.get(name) is OpClass.CONTROL
            and (bodies := compat.bodies_of(equation))
        ):
            return self.run(bodies[0], operands, place, over)
        return self._operation(place, operands, over)

    def _operation(
        self, place: Place, operands: list[RunValue], over: "Devices | None"
    ) -> list[RunValue]:
        """Runs an operation as a whole."""
        equation = place.equations[0]
        arrays = [operand.array for operand in operands]
        if equation.primitive.name in LAYINGS:
            return operands[: len(equation.outvars)]
        # The mesh of an operation in a `shard_map` is that of its own mapping here.
        with compat.where(equation, equation.source_info.name_stack, None, mesh=over is None):
            made = over.bind(equation, arrays) if over else compat.bind(equation, arrays)
        return list(map(RunValue, made, self._watch(place, operands, made)))

    def _scan(
        self, place: Place, operands: list[RunValue], over: "Devices | None"
    ) -> list[RunValue]:
        params = place.equations[0].params
        (body,) = compat.bodies_of(place.equations[0])
        consts, count = compat.scan_counts(params)
        fixed, carry = operands[:consts], operands[consts : consts + count]
        stacked, axis = operands[consts + count :], 1 if over else 0
        turns = range(params["length"])
        rows: list[list[RunValue]] = []
        for turn in reversed(turns) if params["reverse"] else turns:
            slices = [self._slice(x, turn, axis) for x in stacked]
            made = self.run(body, [*fixed, *carry, *slices], _turn(place, turn), over)
            carry, row = made[:count], made[count:]
            rows.append(row)
        if params["reverse"]:
            rows.reverse()
        return [*carry, *self._stacked(rows, place, over)]

    def _slice(self, value: RunValue, turn: int, axis: int) -> RunValue:
        array = jax.lax.index_in_dim(value.array, turn, axis, keepdims=False)
        return RunValue(array, self._join(array, [value.note]))

    def _stacked(
        self, rows: list[list[RunValue]], place: Place, over: "Devices | None"
    ) -> list[RunValue]:
        """Stacks what the turns of a loop returned."""
        if not rows:
            avals: list[Any] = [variable.aval for variable in place.equations[0].outvars]
            count = compat.scan_counts(place.equations[0].params).carry
            lay = over.spread if over else _as_it_is
            return [RunValue(lay(jnp.zeros(x.shape, x.dtype)), None) for x in avals[count:]]
        columns = [list(column) for column in zip(*rows, strict=True)]
        found, axis = [], 1 if over else 0
        for column in columns:
            array = jnp.stack([value.array for value in column], axis)
            found.append(RunValue(array, self._join(array, [value.note for value in column])))
        return found

    def _while(
        self, place: Place, operands: list[RunValue], over: "Devices | None"
    ) -> list[RunValue]:
        params = place.equations[0].params
        tested, consts = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = operands[:tested], operands[tested : tested + consts]
        carry, turn = operands[tested + consts :], 0
        while True:
            here = _turn(place, turn)
            (go_on,) = self.run(params["cond_jaxpr"], [*of_test, *carry], here, over)
            if not _devices_agree(go_on.array):  # some devices are done: it runs as a whole
                return self._operation(place, operands, over)
            if not bool(jnp.ravel(go_on.array)[0]):
                return carry
            carry = self.run(params["body_jaxpr"], [*of_body, *carry], here, over)
            turn += 1

    def _cond(
        self, place: Place, operands: list[RunValue], over: "Devices | None"
    ) -> list[RunValue]:
        branches = place.equations[0].params["branches"]
        index, *rest = operands
        if not _devices_agree(index.array):  # devices take different branches: it runs as a whole
            return self._operation(place, operands, over)
        chosen = int(jnp.clip(jnp.ravel(index.array)[0], 0, len(branches) - 1))
        return self.run(branches[chosen], rest, place, over)

    def _shard_map(self, place: Place, operands: list[RunValue]) -> list[RunValue]:
        equation = place.equations[0]
        over = Devices(equation.params)
        local = [
            RunValue(over.split(x.array, spec), x.note)
            for x, spec in zip(operands, equation.params["in_specs"], strict=True)
        ]
        (body,) = compat.bodies_of(equation)
        made = self.run(body, local, place._replace(mapped=True), over)
        specs = equation.params["out_specs"]
        return [
            RunValue(over.joined(x.array, spec), x.note)
            for x, spec in zip(made, specs, strict=True)
        ]


_LOOPS_AND_BRANCHES: dict[str, Callable[..., list[RunValue]]] = {
    "scan": OneByOne._scan,
    "while": OneByOne._while,
    "cond": OneByOne._cond,
}


class Devices:
    """The devices over which a `shard_map` maps its program.

    A local value is one array with a first axis of devices. Each operation is a `shard_map` of its
    own, in which collectives have the names of the axes.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        self._mesh = automatic_devices(params["mesh"])
        self._axes = frozenset(params["newly_manual_axes"])
        self._checks = params["check_vma"]
        self._all = jax.P(tuple(name for name in self._mesh.axis_names if name in self._axes))

    def split(self, array: Any, spec: Any) -> Any:
        """Returns the local arrays of an argument."""
        return self._mapped(lambda x: x[None], (spec,), self._all)(array)

    def joined(self, array: Any, spec: Any) -> Any:
        """Returns the array that local results are parts of."""
        return self._mapped(lambda x: x[0], (self._all,), spec)(array)

    def spread(self, value: Any) -> Any:
        """Returns a constant as each device has it."""
        return self.split(value, jax.P())

    def bind(self, equation: core.JaxprEqn, arrays: list[Any]) -> list[Any]:
        """Runs an operation on each device."""

        def local(*xs: Any) -> tuple[Any, ...]:
            return tuple(out[None] for out in compat.bind(equation, [x[0] for x in xs]))

        specs = (self._all,) * len(arrays)
        return list(self._mapped(local, specs, self._all, checks=self._checks)(*arrays))

    def _mapped(
        self, fun: Callable[..., Any], in_specs: Any, out_specs: Any, *, checks: bool = False
    ) -> Any:
        mapped = jax.shard_map(
            fun,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self._axes),
            check_vma=checks,
        )
        return jax.jit(mapped)


def _turn(place: Place, turn: int) -> Place:
    return place._replace(turns=(*place.turns, turn))


def _devices_agree(flags: Any) -> bool:
    """Whether all devices say the same."""
    return bool(jnp.all(flags == jnp.ravel(flags)[0]))


def _as_it_is(value: Any) -> Any:
    return value


def _last_reads(jaxpr: core.Jaxpr) -> dict[int, list[Any]]:
    """Returns by the number of each equation the variables that nothing reads after it."""
    seen: set[Any] = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    last: dict[int, list[Any]] = collections.defaultdict(list)
    for number, equation in reversed(list(enumerate(jaxpr.eqns))):
        for atom in (*equation.invars, *equation.outvars):
            if not isinstance(atom, core.Literal) and atom not in seen:
                seen.add(atom)
                last[number].append(atom)
    return last
