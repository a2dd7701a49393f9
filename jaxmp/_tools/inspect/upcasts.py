"""Follows wide values from the cast that made them to the products that use them."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from jaxmp._numerics.dtypes import is_floating, is_inexact, is_narrow
from jaxmp._program.facts import ForwardAnalysis, propagate
from jaxmp._program.op_classes import PRODUCTS
from jaxmp._program.program import Program
from jaxmp._tools.inspect.equations import Site


def mark_upcasts(program: Program) -> list[Site]:
    """Finds the upcasts of a program, and the products that multiply their results.

    A value is wide if it is a float of 32 bits or more, or complex. It comes from an upcast if it
    was computed from the upcast's result through wide values only: a cast to 16 bits ends the
    trail. Fills in `bit` and `fed_by` of the sites of a walked program.

    Returns:
      The equations that may be upcasts: the first has bit 1, the second 2, and so on.
    """
    flow = _Flow()
    propagate(program, [0] * len(program.inputs), flow.analysis(), lambda site: site.bodies)
    return flow.sources


def is_wide(aval: Any) -> bool:
    """Whether an abstract value is a float of at least 32 bits, or complex."""
    return is_inexact(aval) and not is_narrow(aval.dtype)


def is_narrow_aval(aval: Any) -> bool:
    """Whether an abstract value is a float of fewer than 32 bits."""
    return is_floating(aval) and is_narrow(aval.dtype)


def widens_inside(site: Site) -> bool:
    """Whether a product has both narrow and wide operands, and so widens one of them itself."""
    left, right = site.in_avals[:2]
    return (is_narrow_aval(left) and is_wide(right)) or (is_wide(left) and is_narrow_aval(right))


class _Flow:
    def __init__(self) -> None:
        self.sources: list[Site] = []
        # A cache by dtype, since every variable of the program is checked.
        self._wide: dict[Any, bool] = {}

    def analysis(self) -> ForwardAnalysis[int]:
        return ForwardAnalysis(
            bottom=0, join=operator.or_, transfer=self._result_bits, restrict=self._kept_bits
        )

    def _result_bits(self, site: Site, operands: Sequence[int]) -> list[int]:
        is_product = site.name in PRODUCTS
        # Behind the two operands of a product come scales, or the sizes of groups.
        came_from = functools.reduce(operator.or_, operands[:2] if is_product else operands, 0)
        if is_product:
            reads_wide = any(map(self._is_wide, site.in_avals[:2]))
            # A product of 16 bits that returns float32 (`preferred_element_type`) is an upcast too.
            if widens_inside(site) or (not reads_wide and self._is_wide(site.out_avals[0])):
                came_from |= self._bit(site)
            if reads_wide:
                site.fed_by |= came_from
        elif site.name == "convert_element_type" and is_narrow_aval(site.in_avals[0]):
            came_from = self._bit(site) if self._is_wide(site.out_avals[0]) else 0
        return [came_from] * len(site.outputs)

    def _bit(self, site: Site) -> int:
        # A set of upcasts is an int: `propagate` joins such sets for every value of the program.
        if not site.bit:
            site.bit = 1 << len(self.sources)
            self.sources.append(site)
        return site.bit

    def _kept_bits(self, aval: Any, came_from: int) -> int:
        # A single number makes no product wide, and a loss, a loss scale or a gradient norm would
        # connect everything with everything.
        return came_from if came_from and self._is_wide(aval) and aval.size > 1 else 0

    def _is_wide(self, aval: Any) -> bool:
        dtype = getattr(aval, "dtype", None)
        if dtype not in self._wide:
            self._wide[dtype] = is_wide(aval)
        return self._wide[dtype]
