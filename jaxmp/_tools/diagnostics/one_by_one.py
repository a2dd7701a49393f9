"""Runs a program one operation after the other, so that every value can be looked at.

A compiled program hides its values: they are fused, wider than they are written, or gone. Here each
operation runs alone, in the dtypes of the program. Loops turn in Python, and of a conditional only
one branch runs. A `shard_map` runs too: each local value is one array with an axis of devices.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.mesh_axes import automatic_devices, on_automatic_mesh
from jaxmp._program.op_classes import LAYINGS
from jaxmp._program.program import Op
from jaxmp._tools.diagnostics.rerun import Rerun
from jaxmp._tools.inspect.equations import Site


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
    """An array of a running program, and its note.

    Attributes:
      array: the array. In a `shard_map`, local arrays one behind the other, along a first axis.
      note: from the watcher; or, of an array that a loop stacks or slices, from `join`. None for a
        constant of the program.
    """

    array: Any
    note: Any


# Called with the place of each operation, its operands and its results; returns the notes of the
# results.
Watcher = Callable[[Place, list[RunValue], list[Any]], list[Any]]
# Returns the note of an array from those of its parts, or from that of the whole.
Join = Callable[[Any, list[Any]], Any]


class OneByOne(Rerun):
    """Runs programs one operation after the other, on instances of `RunValue`.

    Args:
      watch: sees each operation that contains no program.
      join: returns the note of an array that a loop stacks, from those of its parts, and of an
        array that it slices, from that of the whole.
    """

    # Frees values after their last use: whole models run like this, and a chain of operations
    # needs no more memory at its end than at its start.
    forgets = True

    def __init__(self, watch: Watcher, join: Join) -> None:
        super().__init__()
        self._watch, self._join = watch, join
        self._turns: tuple[int, ...] = ()
        self._over: Devices | None = None

    def constant(self, value: Any) -> RunValue:
        # Constants may have been made on explicit axes, outside of the program.
        return RunValue(self._on_devices(on_automatic_mesh(value)), None)

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the watcher's own operations are in no program

    def whole(self, site: Site, operands: list[Any]) -> list[Any]:
        equation, over = site.equation, self._over
        if site.name in LAYINGS:
            return operands[: len(site.outputs)]
        arrays = [operand.array for operand in operands]
        # The mesh of an operation in a `shard_map` is that of its own mapping here.
        with compat.where(equation, site.stack, None, mesh=over is None):
            results = over.bind(equation, arrays) if over else compat.bind(equation, arrays)
        place = Place(site, self._turns, over is not None)
        return list(map(RunValue, results, self._watch(place, operands, results)))

    def scan(self, site: Site, operands: list[Any]) -> list[Any]:
        wiring, (body,) = site.wiring, compat.bodies_of(site.equation)
        first, stop = wiring.carry.start, wiring.carry.stop
        carry, rows = operands[first:stop], {}
        turns = range(wiring.known_turns)
        axis = 1 if self._over else 0  # behind that of devices
        for turn in reversed(turns) if wiring.reverse else turns:
            arguments = [*operands[:first], *carry]
            for whole in (operands[i] for i in wiring.slices):
                array = jax.lax.index_in_dim(whole.array, turn, axis, keepdims=False)
                arguments.append(RunValue(array, self._join(array, [whole.note])))
            results = self.but(_turns=(*self._turns, turn)).inside(site, body, arguments)
            carry, rows[turn] = results[: len(carry)], results[len(carry) :]
        outs = site.out_avals[len(carry) :]
        columns = zip(*(rows[turn] for turn in turns), strict=True) if rows else [()] * len(outs)
        return [*carry, *map(self._stack, columns, outs)]

    def _stack(self, column: Sequence[RunValue], aval: Any) -> RunValue:
        if not column:  # a scan of length 0
            return RunValue(self._on_devices(jnp.zeros(aval.shape, aval.dtype)), None)
        array = jnp.stack([value.array for value in column], 1 if self._over else 0)
        return RunValue(array, self._join(array, [value.note for value in column]))

    def while_loop(self, site: Site, operands: list[Any]) -> list[Any]:
        test, body = compat.bodies_of(site.equation)
        of_test, of_body = site.wiring.arguments
        first, values = site.wiring.carry.start, list(operands)
        # Devices, and the elements of a `vmap`, end at different turns: it turns until all have.
        for turn in itertools.count():
            rules = self.but(_turns=(*self._turns, turn))
            (go_on,) = rules.inside(site, test, [values[i] for i in of_test])
            if not jnp.any(go_on.array):
                break
            results = rules.inside(site, body, [values[i] for i in of_body])
            choose = functools.partial(self._choose, go_on.array)
            values[first:] = map(choose, results, values[first:])
        return values[first:]

    def _choose(self, flags: Any, new: RunValue, old: RunValue) -> RunValue:
        if jnp.all(flags):
            return new
        # Those that have ended keep their carry: it may overflow if it turned on.
        flags = jnp.expand_dims(flags, range(flags.ndim, new.array.ndim))
        array = jnp.where(flags, new.array, old.array)
        return RunValue(array, self._join(array, [new.note, old.note]))

    def cond(self, site: Site, operands: list[Any]) -> list[Any]:
        branches = compat.bodies_of(site.equation)
        index, *arguments = operands
        first = jnp.ravel(index.array)[0]
        # Devices take different branches: it runs as a whole.
        if jnp.any(index.array != first):
            return self.whole(site, operands)
        chosen = int(jnp.clip(first, 0, len(branches) - 1))  # as lax.switch does
        return self.inside(site, branches[chosen], arguments)

    def shard_map(self, site: Site, operands: list[Any]) -> list[Any]:
        # One inside of another: local arrays have one axis of devices, and not two.
        if self._over is not None:
            return self.whole(site, operands)
        (body,) = compat.bodies_of(site.equation)
        over = Devices(site.params)
        local = [
            RunValue(over.split(x.array, spec), x.note)
            for x, spec in zip(operands, site.params["in_specs"], strict=True)
        ]
        results = self.but(_over=over).inside(site, body, local)
        return [
            RunValue(over.join(x.array, spec), x.note)
            for x, spec in zip(results, site.params["out_specs"], strict=True)
        ]

    def _on_devices(self, value: Any) -> Any:
        return self._over.split(value, jax.P()) if self._over else value


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

    def join(self, array: Any, spec: Any) -> Any:
        """Returns the array that local results are parts of."""
        return self._mapped(lambda x: x[0], (self._all,), spec)(array)

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
