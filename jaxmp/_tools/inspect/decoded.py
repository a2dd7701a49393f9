"""Finds operands of products that were rounded to 8 bits and widened again.

Recipes with a scale for each block round to 8 bits and multiply in 16, as no compiler has a
kernel for them. The dtypes of such a product do not show it.
"""

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxmp._numerics.dtypes import code_kind, is_floating
from jaxmp._program.facts import ForwardAnalysis, propagate
from jaxmp._program.op_classes import ENCODES, IDENTITIES, PRODUCTS, REPEATS, SAME_NUMBERS, SCALES
from jaxmp._program.program import Program
from jaxmp._tools.inspect.equations import Site

# Stands for each of its formats.
FLOAT8 = "float8"
# The fact about a value is the 8-bit dtype that it was rounded to, up to a scale; or one of these.
# So facts are names of dtypes, which a report shows as they are.
_SCALE, _OTHER = "scale", ""


def decoded_operands(program: Program) -> dict[Site, tuple[str, ...]]:
    """Finds the products with an operand that was rounded to 8 bits and then widened.

    Casts, moves and scales may stand in between. A scale is what came with the codes of a rounding,
    or one factor for all numbers.

    Returns:
      For each such product of a walked program, the dtypes of its two operands before they were
      widened.
    """
    products: dict[Site, tuple[str, ...]] = {}

    def rule(site: Site, facts: Sequence[str]) -> Sequence[str]:
        if site.name in PRODUCTS:
            dtypes = tuple(str(aval.dtype) for aval in site.in_avals[:2])
            pairs = zip(facts[:2], dtypes, strict=True)
            before = tuple(fact if code_kind(fact) else dtype for fact, dtype in pairs)
            products.pop(site, None)  # `propagate` visits a loop again, with the facts of its carry
            if before != dtypes:
                products[site] = before
        return _result_facts(site, facts)

    analysis = ForwardAnalysis(
        _OTHER, _common_fact, rule, literal=lambda number: _SCALE, restrict=_typed_fact
    )
    propagate(program, [_OTHER] * len(program.inputs), analysis, lambda site: site.bodies)
    return products


def are_among(operands: Iterable[str], names: Collection[str]) -> bool:
    """Whether the dtypes of operands are all among some names.

    >>> are_among(("float8_e4m3fn", "float8_e5m2"), ["float8"])
    True
    """
    return all(
        dtype in names or (FLOAT8 in names and dtype.startswith(FLOAT8)) for dtype in operands
    )


def _common_fact(one: str, other: str) -> str:
    return one if one == other else _OTHER


def _typed_fact(aval: Any, fact: str) -> str:
    dtype = str(getattr(aval, "dtype", ""))
    # The type of codes says more than the operation that made them, such as a user's own cast.
    if dtype.startswith(FLOAT8):  # int8 may be anything, such as a pixel
        return dtype
    return fact or (_SCALE if getattr(aval, "size", 0) == 1 else _OTHER)


def _result_facts(site: Site, facts: Sequence[str]) -> Sequence[str]:
    count = len(site.outputs)
    if site.name in ENCODES:
        return [str(site.out_avals[0].dtype), _SCALE]
    if site.name == "optimization_barrier":
        return facts
    if site.name in IDENTITIES:
        return [facts[0]]
    if site.name in SCALES:
        # Codes times a scale are codes still; codes times codes, or plus other numbers, are not.
        others = [fact for fact in facts if fact != _SCALE]
        return [others[0] if len(others) == 1 else _OTHER if others else _SCALE]
    if site.name in SAME_NUMBERS | REPEATS:
        # Indices and flags say nothing about the numbers that they select.
        pairs = zip(site.in_avals, facts, strict=True)
        floats = [fact for aval, fact in pairs if is_floating(aval) or code_kind(fact)]
        return [functools.reduce(_common_fact, floats) if floats else _OTHER] * count
    return [_OTHER] * count
