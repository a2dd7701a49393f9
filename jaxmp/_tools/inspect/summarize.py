"""Makes the rows of a report from the equations of a program."""

import collections
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxmp._numerics.dtypes import code_kind, nbytes_of
from jaxmp._numerics.precision import name_of_param
from jaxmp._program.op_classes import CASTS, CLASSES, COLLECTIVES, ENCODES, PRODUCTS, OpClass
from jaxmp._program.program import Program
from jaxmp._program.scopes import why_left_out
from jaxmp._tools.inspect.branches import BranchPart, most
from jaxmp._tools.inspect.decoded import decoded_operands
from jaxmp._tools.inspect.equations import Site, all_sites
from jaxmp._tools.inspect.lines import direction, line_of, module_path, scopes_of
from jaxmp._tools.inspect.rows import (
    Collective,
    Convert,
    Equations,
    LeftOut,
    Product,
    ProductLine,
    Recomputed,
    Unseen,
    Upcast,
    Work,
    grouped,
)
from jaxmp._tools.inspect.upcasts import is_narrow_aval, is_wide, mark_upcasts, widens_inside


class Where(NamedTuple):
    """The place that an equation comes from."""

    line: str
    path: str
    direction: str


class ProductKey(NamedTuple):
    """The attributes of `Product` that the products of a row share."""

    operands: tuple[str, str]
    result: str
    precision: str
    rounded_to: tuple[str, ...]


class Tally:
    """The equations of a whole program, grouped into rows."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.sites = list(all_sites(program))
        self.flops = _flops(self.sites)
        # Most methods ask for the places of the same sites again.
        self._where: dict[Site, Where] = {}

    # Only for a report with products: it follows every value of the program.
    @functools.cached_property
    def _decoded(self) -> dict[Site, tuple[str, ...]]:
        return decoded_operands(self._program)

    def products(self) -> tuple[Product, ...]:
        """Returns products by dtypes and precision, most FLOPs first."""
        rows = [
            Product(**kind._asdict(), **_counts(sites), **self._flops(sites))
            for kind, sites in grouped(self._products(), self._product_key).items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.flops))

    def product_lines(self) -> tuple[ProductLine, ...]:
        """Returns products by dtypes, precision and line, most FLOPs first."""
        groups = grouped(
            self._products(),
            lambda site: (self._product_key(site), self.where(site), _why_not_float8(site)),
        )
        rows = [
            ProductLine(
                **kind._asdict(),
                **_counts(sites),
                **self._flops(sites),
                **where._asdict(),
                branch=branch_text(sites),
                not_float8=reason,
            )
            for (kind, where, reason), sites in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.flops))

    def left_out(self) -> tuple[LeftOut, ...]:
        """Returns products that were left out of 8 bits by line and reason, most FLOPs first."""

        def key(site: Site) -> tuple[str, str, str]:
            where = self.where(site)
            return _why_not_float8(site), where.line, where.path

        rows = [
            LeftOut(
                reason=reason,
                line=line,
                path=path,
                **_counts(sites),
                **self._flops(sites),
                branch=branch_text(sites),
            )
            for (reason, line, path), sites in grouped(self._products(), key).items()
            if reason  # both passes are one row: a layer is left out as a whole
        ]
        return tuple(sorted(rows, key=lambda row: -row.flops))

    def _product_key(self, site: Site) -> "ProductKey":
        operands, result = _product_dtypes(site)
        # Devices multiply 16 bits in one way: only float32 has a precision.
        is_float32 = "float32" in operands
        precision = name_of_param(site.equation.params.get("precision")) if is_float32 else ""
        return ProductKey(operands, result, precision, self._decoded.get(site, ()))

    def upcasts(self) -> tuple[Upcast, ...]:
        """Returns upcasts by line; first those that make products wide, then the others by size.

        Upcasts that cause the most FLOPs come first.
        """
        candidates = mark_upcasts(self._program)
        wide_products = [site for site in self._products() if site.fed_by]
        sources = [site for site in candidates if _is_upcast(site, wide_products)]

        def key(site: Site) -> tuple[Where, Any, str, str]:
            kind, operands = "cast", site.in_avals[:1]
            if site.name in PRODUCTS:
                kind, operands = "product", site.in_avals[:2]
            # Of a product the operand that it widens.
            narrow = next(_dtype_of(x) for x in operands if is_narrow_aval(x) or not is_wide(x))
            return self.where(site), kind, narrow, _dtype_of(site.out_avals[0])

        rows: list[tuple[tuple[int, int, int], Upcast]] = []
        for (where, kind, source, target), sites in grouped(sources, key).items():
            bits = sum(site.bit for site in sites)
            upcast = Upcast(
                **where._asdict(),
                kind=kind,
                source=source,
                target=target,
                **_counts(sites),
                bytes=sum(_bytes(site.out_avals) * site.runs for site in sites),
                **self._flops(site for site in wide_products if site.fed_by & bits),
                branch=branch_text(sites),
            )
            # If several upcasts feed a product, the first in the program, the lowest bit, counts as
            # the cause, since the others were widened to match it.
            cause = _flops(site for site in wide_products if site.fed_by & -site.fed_by & bits)
            # By the FLOPs that they cause, then by those that they share, then by size. The sort
            # keeps the order of the program among equals.
            rank = -cause, 0 if cause else -upcast.flops, 0 if upcast.flops else -upcast.bytes
            rows.append((rank, upcast))
        rows.sort(key=lambda pair: pair[0])
        return tuple(upcast for _, upcast in rows)

    def converts(self) -> tuple[Convert, ...]:
        """Returns casts by dtypes, largest first."""

        def key(site: Site) -> tuple[str, str]:
            return _dtype_of(site.in_avals[0]), _dtype_of(site.out_avals[0])

        casts = [site for site in self.sites if site.name in CASTS]
        # Only a rounding to 8 bits with a scale from the data reads its operand once more before.
        rows = [
            Convert(
                *dtypes,
                **_counts(sites),
                # Behind codes come their scales.
                bytes=sum(_bytes(s.out_avals[:1]) * s.runs for s in sites),
                amax_bytes=sum(_bytes(s.in_avals) * s.runs for s in sites if s.name in ENCODES),
            )
            for dtypes, sites in grouped(casts, key).items()
            if dtypes[0] != dtypes[1]  # such a cast only makes a weak type strong
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def collectives(self) -> tuple[Collective, ...]:
        """Returns collectives by line, largest first."""
        groups: dict[Any, list[tuple[Site, int]]] = collections.defaultdict(list)
        for site in self.sites:
            if site.name.removesuffix("_start") not in COLLECTIVES:
                continue
            params = site.equation.params
            names = params.get("axes", params.get("axis_name", ()))
            names = names if isinstance(names, tuple) else (names,)
            # An axis of `vmap` is a number: a sum over it leaves no device.
            axes = tuple(str(name) for name in names if not isinstance(name, int))
            if not axes:
                continue
            for dtype, avals in grouped(site.in_avals, _dtype_of).items():
                key = (site.name, axes, dtype), self.where(site)
                groups[key].append((site, _bytes(avals)))
        rows = [
            Collective(
                name=name,
                axes=axes,
                dtype=dtype,
                **where._asdict(),
                **_counts([site for site, _ in pairs]),
                bytes=sum(site.runs * size for site, size in pairs),
                branch=branch_text([site for site, _ in pairs]),
            )
            for ((name, axes, dtype), where), pairs in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def equations(self) -> tuple[Equations, ...]:
        """Returns the numbers of equations by primitive, most frequent first."""
        groups = grouped(self.sites, lambda site: site.name)
        rows = [Equations(name, **_counts(sites)) for name, sites in groups.items()]
        return tuple(sorted(rows, key=lambda row: (-row.count, row.primitive)))

    def recomputed(self) -> tuple[Recomputed, ...]:
        """Returns recomputed equations by line, most operations first; none that only move."""
        sites = [
            site
            for site in self.sites
            if not site.bodies and _operations(site) and self.where(site).direction == "recomputed"
        ]
        groups = grouped(sites, lambda site: (self.where(site).line, self.where(site).path))
        rows = [
            Recomputed(
                *place,
                **_counts(sites),
                operations=sum(_operations(site) * site.runs for site in sites),
                branch=branch_text(sites),
            )
            for place, sites in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.operations))

    def work(self) -> tuple[Work, ...]:
        """Returns the FLOPs of products by dtypes and branches."""
        groups = grouped(self._products(), lambda site: (_product_dtypes(site)[0], site.branches))
        return tuple(
            Work(operands, sum(site.flops * site.runs for site in sites), branches)
            for (operands, branches), sites in groups.items()
        )

    def unseen(self, sites: Iterable[Site]) -> tuple[Unseen, ...]:
        """Returns the rows of unseen equations by primitive, dtypes and line, in program order."""

        def key(site: Site) -> tuple[str, tuple[str, ...], Where]:
            # Of a while loop, the operands of its products.
            inner = [op for body in site.bodies for op in all_sites(body) if op.name in PRODUCTS]
            dtypes = {dtype for op in inner for dtype in _product_dtypes(op)[0]}
            dtypes = dtypes or set(map(_dtype_of, site.in_avals))
            return site.name, tuple(sorted(dtypes)), self.where(site)

        return tuple(
            Unseen(name, dtypes, **where._asdict(), count=len(group), branch=branch_text(group))
            for (name, dtypes, where), group in grouped(sites, key).items()
        )

    def where(self, site: Site) -> Where:
        """Returns the line, the module path and the direction of an equation."""
        if site not in self._where:
            scopes = scopes_of(site)
            self._where[site] = Where(line_of(site), module_path(scopes), direction(scopes))
        return self._where[site]

    def _products(self) -> list[Site]:
        return [site for site in self.sites if site.name in PRODUCTS]

    def _flops(self, sites: Iterable[Site]) -> dict[str, Any]:
        flops = _flops(sites)
        return {"flops": flops, "share": flops / self.flops if self.flops else 0.0}


def _why_not_float8(site: Site) -> str:
    """Returns why a policy in 8 bits or its recipe left a product out; empty for other products."""
    # The product of a recipe is the body of a primitive, whose params hold the recipe.
    outer = site.outer.equation.params if site.outer is not None else {}
    product_map: Any = outer.get("product_map")
    recipe = getattr(product_map, "recipe", None)
    if any(map(code_kind, _product_dtypes(site)[0])):
        return ""  # a rule puts it in 8 bits, though the module around it is left out
    if recipe is None or product_map.multiplies_codes(outer["returned"]):
        return why_left_out(scopes_of(site))
    return f"{recipe} has gradients of weights in {recipe.weight_gradient}"


def _flops(sites: Iterable[Site]) -> int:
    """Returns the FLOPs of products; of exclusive branches, counts those with the most."""
    return most(
        BranchPart(site.branches, 0, site.flops * site.runs) for site in sites if site.flops
    )


def _operations(site: Site) -> int:
    """Returns how many operations an equation takes: about one for each number it computes."""
    # A move computes nothing. Its line would only say that it costs 0 operations.
    if site.flops or CLASSES.get(site.name) is OpClass.MOVE:
        return site.flops
    sizes = [math.prod(getattr(x, "shape", ())) for x in (*site.in_avals, *site.out_avals)]
    return max(sizes, default=0)  # a debug message may have no operands and no results


# More names than this make a row of the table unreadable.
_MOST_BRANCHES = 3


def branch_text(sites: Iterable[Site]) -> str:
    """Formats the branches around equations; empty if an equation is outside of all branches.

    >>> branch_text([])
    ''
    """
    paths = dict.fromkeys(site.branches for site in sites)
    # What also runs outside of a branch is in none.
    if () in paths:
        return ""
    texts = list(dict.fromkeys(" / ".join(choice.name for choice in path) for path in paths))
    more = len(texts) - _MOST_BRANCHES
    return "; ".join(texts[:_MOST_BRANCHES] + ([f"{more} more"] if more > 0 else []))


def _is_upcast(site: Site, wide_products: list[Site]) -> bool:
    """Whether to report a candidate; products only if they are the cause of wide products."""
    if site.name not in PRODUCTS:
        return True
    # A wide operand that an upcast made is that upcast's fault, not the product's.
    if widens_inside(site):
        return site.fed_by == site.bit
    # Nothing is lost by a wide result that no product reads.
    return any(product.fed_by & site.bit for product in wide_products)


# Behind the operands of a product may come scales or the sizes of groups.
def _product_dtypes(site: Site) -> tuple[tuple[str, str], str]:
    left, right = map(_dtype_of, site.in_avals[:2])
    return (left, right), _dtype_of(site.out_avals[0])


def _dtype_of(aval: Any) -> str:
    return str(getattr(aval, "dtype", "none"))


def _bytes(avals: Iterable[Any]) -> int:
    return sum(map(nbytes_of, avals))


def _counts(sites: list[Site]) -> dict[str, Any]:
    return {"count": len(sites), "runs": sum(site.runs for site in sites)}
