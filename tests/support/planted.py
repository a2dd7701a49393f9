"""Programs with a change of dtype in one place, for tests of what should see it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._numerics.dtypes import is_floating
from jaxmp._program import compat
from jaxmp._program.evaluate import Interpreter, evaluate
from jaxmp._program.facts import operations_read
from jaxmp._program.op_classes import CALLS, CONTROL_FLOW
from jaxmp._program.program import Op, read
from jaxmp._tools.inspect.equations import Site, walk

Run = Callable[..., Any]


class _InAnotherDtype(Interpreter[Any]):
    """Runs one operation in another dtype, between casts; all others as they were traced."""

    def __init__(self, target: Any, dtype: Any) -> None:
        self.target, self.dtype = target, dtype

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        if op.equation is not self.target:
            return super().operation(op, operands)
        cast = [x.astype(self.dtype) if is_floating(x) else x for x in map(jnp.asarray, operands)]
        params = {
            name: jnp.dtype(self.dtype)
            if name.endswith(("dtype", "element_type")) and value
            else value
            for name, value in op.equation.params.items()
        }
        results = compat.bind(op.equation.replace(params=params), cast)
        pairs = zip(results, op.out_avals, strict=True)
        return [x.astype(aval.dtype) if is_floating(aval) else x for x, aval in pairs]


def traced(run: Run, *args: Any) -> Any:
    """The program of a function of arrays, with a flat list of results."""
    return jax.make_jaxpr(
        lambda *leaves: jax.tree.leaves(run(*jax.tree.unflatten(jax.tree.structure(args), leaves)))
    )(*jax.tree.leaves(args))


def float_sites(closed: Any) -> list[Site]:
    """The operations of a program that compute or move floats, and that something reads.

    Those that hold programs are left out.
    """
    sites: list[Any] = [
        site
        for site in operations_read(walk(closed), lambda site: site.bodies)
        if site.name not in CONTROL_FLOW | CALLS
        and not site.bodies
        and _is_reached(site)
        and any(map(is_floating, [*site.in_avals, *site.out_avals]))
    ]
    return list({id(site.equation): site for site in sites}.values())


def _is_reached(site: Site) -> bool:
    """Whether an evaluator comes there: it runs a product of jaxmp with its derivatives whole."""
    return site.outer is None or (
        site.outer.name in CONTROL_FLOW | CALLS and _is_reached(site.outer)
    )


def planted(closed: Any, target: Any = None, dtype: Any = None) -> Run:
    """The function of a program, in which one equation runs in another dtype."""

    def run(*leaves: Any) -> list[Any]:
        return evaluate(read(closed), leaves, _InAnotherDtype(target, dtype))

    return run
