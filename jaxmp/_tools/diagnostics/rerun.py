"""Runs a program again, with each operation at its place known.

Under the trace of the caller nothing runs at once: the result can be compiled. Subclasses differ in
what they do at an operation; `one_by_one` also turns loops in Python.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._numerics.histograms import zeros_as
from jaxmp._primitives.varying import varying_axes
from jaxmp._program import compat
from jaxmp._program.control_flow import cond_again, scan_again, while_again
from jaxmp._program.evaluate import Interpreter, evaluate
from jaxmp._program.op_classes import CLASSES, OpClass
from jaxmp._program.program import Op, Program, read
from jaxmp._tools.inspect.equations import Site, site_of

# The place of a value: the numbers of the equations around it, of its own, and of the result.
Key = tuple[int, ...]
# The results of a program, and the arrays that were saved of the values in it.
ResultsAndSaved = tuple[list[Any], dict[Key, Any]]


class Rerun(Interpreter[Any]):
    """Runs a program again. Subclasses say what an operation does, and what to save of values.

    Attributes:
      join: makes one array of those that turns or devices saved, stacked along a first axis; zeros
        stand for nothing. Without it, nothing is saved in a `while`, and a `shard_map` is an
        operation.
      outer: the operation that the program is in; None for the whole program.
      key: the place of that operation.
      saved: the arrays that were saved of the values so far, by place.
    """

    join: Callable[[Any], Any] | None = None

    def __init__(self) -> None:
        self.outer: Site | None = None
        self.key: Key = ()
        self.saved: dict[Key, Any] = {}

    def but(self, **attributes: Any) -> Any:
        """Returns this interpreter with other attributes."""
        # A shallow copy: all programs of a run share the rest, such as the lists of a subclass.
        interpreter = copy.copy(self)
        vars(interpreter).update(attributes)
        return interpreter

    def run(self, program: Program, arguments: Any) -> list[Any]:
        """Runs a program from the cells of its arguments."""
        return evaluate(program, arguments, self)

    def inside(self, op: Any, body: Any, arguments: Any, *choice: int) -> list[Any]:
        """Runs a program inside of an operation; `choice` says which of several it is."""
        # Even numbers: the results of the operation itself have odd ones, and come after.
        interpreter = self.but(outer=op, key=(*self.key, 2 * op.number, *choice))
        return interpreter.run(read(body), arguments)

    def collecting(self, site: Site, body: Any, *choice: int) -> Callable[..., ResultsAndSaved]:
        """Returns a function that runs a program inside, and returns the saved arrays too."""

        # Arrays of an inner trace must leave it as its results.
        def run(arguments: Any, _: Any = ()) -> ResultsAndSaved:
            interpreter = self.but(saved={})
            return interpreter.inside(site, body, arguments, *choice), interpreter.saved

        return run

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        # Loops before calls: a scan has one program inside, as a call has.
        site = site_of(op, self.outer)
        if site.wiring.counted:
            return self.scan(site, operands)
        if site.wiring.loops:
            return self.while_loop(site, operands)
        if site.wiring.chooses:
            return self.cond(site, operands)
        if site.name == "shard_map":
            return self.shard_map(site, operands)
        if (program := self.program_of_call(site)) is not None:
            return self.inside(site, program, operands)
        return self.whole(site, operands)

    def whole(self, site: Site, operands: list[Any]) -> list[Any]:
        """Runs an operation without looking into it."""
        return compat.bind(site.equation, operands)

    def program_of_call(self, site: Site) -> Any:
        """Returns the program that an operation runs once; None if it is not a call."""
        programs = compat.bodies_of(site.equation)
        return programs[0] if CLASSES.get(site.name) is OpClass.CONTROL and programs else None

    def scan(self, site: Site, operands: list[Any]) -> list[Any]:
        """Runs a scan again; what its turns save is stacked."""
        (body,) = compat.bodies_of(site.equation)
        return self._results_of(scan_again(site.equation, operands, self.collecting(site, body)))

    def while_loop(self, site: Site, operands: list[Any]) -> list[Any]:
        """Runs a while loop again; what its turns save is joined, as their number is not known."""
        test, body = compat.bodies_of(site.equation)
        of_test, of_body = self.collecting(site, test, -1), self.collecting(site, body)

        def once(arguments: list[Any]) -> ResultsAndSaved:
            results, saved = of_body(arguments)
            return results, {} if self.join is None else saved

        def turn(arguments: list[Any], before: dict[Key, Any]) -> ResultsAndSaved:
            results, saved = once(arguments)
            return results, self._join_all(jax.tree.map(lambda *x: jnp.stack(x), before, saved))

        # A carry has its type from the start: zeros stand for no turn.
        nothing = zeros_as(once, [operands[i] for i in site.wiring.arguments[1]])[1]
        return self._results_of(
            while_again(site.wiring, operands, lambda x: of_test(x)[0][0], turn, nothing)
        )

    def cond(self, site: Site, operands: list[Any]) -> list[Any]:
        """Runs a conditional again; of a branch that does not run, zeros are saved."""
        bodies = compat.bodies_of(site.equation)
        branches = [self.collecting(site, body, i) for i, body in enumerate(bodies)]
        return self._results_of(cond_again(operands, branches))

    def shard_map(self, site: Site, operands: list[Any]) -> list[Any]:
        """Runs a program on each device again, and joins what they save."""
        # What devices save cannot leave it as one array then.
        if self.join is None:
            return self.whole(site, operands)
        (body,) = compat.bodies_of(site.equation)
        params, on_device = site.params, self.collecting(site, body)
        axes, checked = tuple(sorted(params["newly_manual_axes"])), params["check_vma"]

        def local(*arguments: Any) -> tuple[Any, ...]:
            results, saved = on_device(arguments)
            return (*results, jax.tree.map(lambda x: _part_of_device(x, axes, checked), saved))

        mapped = params | {"out_specs": (*params["out_specs"], jax.P(axes))}
        *results, saved = compat.shard_map_again(mapped, local)(*operands)
        return self._results_of((results, self._join_all(saved)))

    def _join_all(self, saved: dict[Key, Any]) -> dict[Key, Any]:
        return {} if self.join is None else {key: self.join(x) for key, x in saved.items()}

    def _results_of(self, pair: ResultsAndSaved) -> list[Any]:
        results, saved = pair
        self.saved |= saved
        return results


def _part_of_device(x: Any, axes: tuple[str, ...], checked: bool) -> Any:
    # Zeros where another device has the same: it counts once.
    # Without `check_vma` JAX does not know which devices have the same: each counts.
    same = [axis for axis in axes if checked and axis not in varying_axes(x)]
    for axis in same:
        x = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
    return x[None]
