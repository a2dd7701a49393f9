"""Runs a program one operation after the other, so that every value can be looked at.

A compiled program hides its values: they are fused, wider than they are written, or gone. Here each
operation runs alone, in the dtypes of the program. Loops turn in Python, and of a branch the one
that is taken runs. A `shard_map` runs too: each local value is one array with an axis of devices.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._diagnostics.rerun import Key, Made, Rerun
from jaxmp._inspect.equations import Site
from jaxmp._program import compat
from jaxmp._program.mesh_axes import automatic_devices, on_automatic_mesh
from jaxmp._program.op_classes import LAYINGS


class Place(NamedTuple):
    """The place of an operation in a running program.

    Attributes:
      site: the operation, and those around it.
      turns: the numbers of the turns of the loops around it, outermost first.
      mapped: whether it is in a `shard_map`, where arrays have a first axis of devices here.
    """

    site: Site
    turns: tuple[int, ...]
    mapped: bool


@dataclasses.dataclass(slots=True)
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


class OneByOne(Rerun):
    """Runs programs one operation after the other, on instances of `RunValue`.

    Args:
      watch: sees each operation that contains no program.
      of_parts: returns the note of an array that a loop stacks, from those of its parts, and of
        what it slices, from that of the whole.
    """

    def __init__(self, watch: Watcher, of_parts: Join) -> None:
        self._watch, self._of_parts = watch, of_parts
        self._turns: tuple[int, ...] = ()
        self._over: Devices | None = None

    def given(self, value: Any) -> RunValue:
        # Constants may have been made on explicit axes, outside of the program.
        return RunValue(self._laid(on_automatic_mesh(value)), None)

    def where(self, equation: core.JaxprEqn) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # what looks at values is in no program

    def operation(self, site: Site, values: list[Any]) -> list[Any]:
        equation, over = site.equation, self._over
        if site.name in LAYINGS:
            return values[: len(equation.outvars)]
        arrays = [value.array for value in values]
        # The mesh of an operation in a `shard_map` is that of its own mapping here.
        with compat.where(equation, equation.source_info.name_stack, None, mesh=over is None):
            made = over.bind(equation, arrays) if over else compat.bind(equation, arrays)
        place = Place(site, self._turns, over is not None)
        return list(map(RunValue, made, self._watch(place, values, made)))

    def scan(self, site: Site, values: list[Any], key: Key) -> Made:
        params = site.equation.params
        (body,) = compat.bodies_of(site.equation)
        consts, count = compat.scan_counts(params)
        fixed, carry = values[:consts], values[consts : consts + count]
        stacked, turns = values[consts + count :], range(params["length"])
        rows: list[list[RunValue]] = []
        for turn in reversed(turns) if params["reverse"] else turns:
            slices = [self._slice(x, turn) for x in stacked]
            made = self._in_turn(turn, body, [*fixed, *carry, *slices], key, site)
            carry, row = made[:count], made[count:]
            rows.append(row)
        if params["reverse"]:
            rows.reverse()
        outs: list[Any] = site.equation.outvars[count:]
        columns = zip(*rows, strict=True) if rows else [[]] * len(outs)
        return [*carry, *map(self._stacked, columns, [variable.aval for variable in outs])], {}

    def _slice(self, value: RunValue, turn: int) -> RunValue:
        array = jax.lax.index_in_dim(value.array, turn, self._axis, keepdims=False)
        return RunValue(array, self._of_parts(array, [value.note]))

    def _stacked(self, column: Sequence[RunValue], aval: Any) -> RunValue:
        """Stacks what the turns of a loop returned, in the type that it has."""
        if not column:
            return RunValue(self._laid(jnp.zeros(aval.shape, aval.dtype)), None)
        array = jnp.stack([value.array for value in column], self._axis)
        return RunValue(array, self._of_parts(array, [value.note for value in column]))

    def while_loop(self, site: Site, values: list[Any], key: Key) -> Made:
        params = site.equation.params
        tested, consts = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = values[:tested], values[tested : tested + consts]
        carry, turn = values[tested + consts :], 0
        while True:
            test = [*of_test, *carry]
            (go_on,) = self._in_turn(turn, params["cond_jaxpr"], test, key, site)
            if not jnp.any(go_on.array):
                return carry, {}
            made = self._in_turn(turn, params["body_jaxpr"], [*of_body, *carry], key, site)
            carry = [self._where(go_on.array, *pair) for pair in zip(made, carry, strict=True)]
            turn += 1

    def _where(self, flags: Any, new: RunValue, old: RunValue) -> RunValue:
        """Returns a carry in which devices, or the elements of a `vmap`, keep it once done."""
        if jnp.all(flags):
            return new
        flags = jnp.expand_dims(flags, range(flags.ndim, new.array.ndim))
        array = jnp.where(flags, new.array, old.array)
        return RunValue(array, self._of_parts(array, [new.note, old.note]))

    def cond(self, site: Site, values: list[Any], key: Key) -> Made:
        branches = site.equation.params["branches"]
        index, *rest = values
        first = jnp.ravel(index.array)[0]
        if jnp.any(index.array != first):  # devices take different branches: it runs as a whole
            return self.operation(site, values), {}
        chosen = int(jnp.clip(first, 0, len(branches) - 1))
        return self.run(branches[chosen], rest, key, site)

    def shard_map(self, site: Site, values: list[Any], key: Key) -> Made:
        if self._over is not None:
            return self.operation(site, values), {}
        params = site.equation.params
        self._over = over = Devices(params)
        local = [
            RunValue(over.split(x.array, spec), x.note)
            for x, spec in zip(values, params["in_specs"], strict=True)
        ]
        (body,) = compat.bodies_of(site.equation)
        made, _ = self.run(body, local, key, site)
        self._over = None
        return [
            RunValue(over.joined(x.array, spec), x.note)
            for x, spec in zip(made, params["out_specs"], strict=True)
        ], {}

    def _in_turn(
        self, turn: int, program: Any, values: list[Any], key: Key, site: Site
    ) -> list[Any]:
        around, self._turns = self._turns, (*self._turns, turn)
        made, _ = self.run(program, values, key, site)
        self._turns = around
        return made

    @property
    def _axis(self) -> int:
        """The first axis of a value in the program."""
        return 1 if self._over else 0

    def _laid(self, value: Any) -> Any:
        """Returns a constant as each device has it."""
        return self._over.spread(value) if self._over else value


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
