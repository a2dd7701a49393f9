"""Which results of a program are its arguments, cast or moved."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jaxmp._audit._walk import Body, Site
from jaxmp._compat import scan_counts
from jaxmp._dtypes import is_floating

# The numbers stay what they are. A gather is none of them: its rows are activations.
_MOVES = frozenset(
    (
        *("convert_element_type", "reduce_precision", "copy", "copy_p", "held", "name"),
        *("stop_gradient", "optimization_barrier", "reshape", "transpose", "squeeze", "rev"),
        *("expand_dims", "slice", "dynamic_slice", "split", "concatenate", "stack", "unstack"),
        *("broadcast_in_dim", "sharding_constraint", "layout_constraint", "reshard", "mesh_cast"),
        *("device_put", "all_gather", "all_gather_invariant", "all_gather_reduced", "pvary"),
        *("pcast", "reduced_vary_cast"),
    )
)


def copies(body: Body, given: Sequence[bool]) -> list[bool]:
    """Which results are copies of some arguments, of those that are given.

    Args:
      body: a program.
      given: which arguments it is asked about.

    Returns:
      For each result whether it was made of such arguments alone, by casts and moves.
    """
    known: dict[Any, bool] = dict(zip(body.jaxpr.invars, given, strict=True))

    def read(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and known.get(atom, False)

    for site in body.sites:
        operands = [read(atom) for atom in site.equation.invars]
        made = _inside(site, operands) if site.bodies else _moved(site, operands)
        known.update(zip(site.equation.outvars, made, strict=True))
    return [read(atom) for atom in body.jaxpr.outvars]


def _moved(site: Site, operands: list[bool]) -> list[bool]:
    equation = site.equation
    none = [False] * len(equation.outvars)
    if site.name not in _MOVES:
        return none
    if site.name == "optimization_barrier":
        return operands
    floats = [
        is_copy
        for atom, is_copy in zip(equation.invars, operands, strict=True)
        if is_floating(atom.aval)
    ]
    # A bias that is laid out over a batch is as large as an activation.
    grows = site.name == "broadcast_in_dim" and (
        equation.outvars[0].aval.size > equation.invars[0].aval.size
    )
    return none if grows or not floats else [all(floats)] * len(equation.outvars)


def _inside(site: Site, operands: list[bool]) -> list[bool]:
    """The same for an equation with programs inside; what a loop carries is no copy."""
    none = [False] * len(site.equation.outvars)
    if site.name == "while":
        return none
    if site.name == "scan":
        start, carried = scan_counts(site.equation.params)
        operands = [
            is_copy and not start <= i < start + carried for i, is_copy in enumerate(operands)
        ]
    if site.name == "cond":
        operands = operands[1:]
    if any(len(body.jaxpr.invars) != len(operands) for body in site.bodies):
        return none
    found = [copies(body, operands) for body in site.bodies]
    if any(len(each) != len(none) for each in found):
        return none
    made = [any(each) for each in zip(*found, strict=True)]
    if site.name == "scan":
        made[:carried] = [False] * carried
    return made
