"""Makes the rows of a report from the equations of a program."""

import collections
import functools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from jaxmp._numerics.dtypes import nbytes_of
from jaxmp._numerics.precision import name_of_param
from jaxmp._program.op_classes import CASTS, CLASSES, COLLECTIVES, PRODUCTS, OpClass
from jaxmp._program.program import Program
from jaxmp._program.scopes import why_left_out
from jaxmp._tools.inspect.branches import Part, most
from jaxmp._tools.inspect.decoded import FLOAT8, decoded_operands
from jaxmp._tools.inspect.equations import Site, all_sites
from jaxmp._tools.inspect.lines import Lines, direction, module_path, scopes_of
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
)
from jaxmp._tools.inspect.upcasts import is_narrow_aval, is_wide, mark_upcasts, widens_inside

_Key = TypeVar("_Key", bound=Hashable)


class Where(NamedTuple):
    """The place that an equation comes from."""

    line: str
    path: str
    direction: str


class _Kind(NamedTuple):
    """What is alike in the products of a row: attributes as in `Product`."""

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
        self._lines = Lines()
        self._where: dict[Site, Where] = {}

    @functools.cached_property
    def _decoded(self) -> dict[Site, tuple[str, ...]]:
        return decoded_operands(self._program)

    def products(self) -> tuple[Product, ...]:
        """Returns products by dtypes and precision, most FLOPs first."""
        rows = [
            Product(**kind._asdict(), **_counts(sites), **self._flops(sites))
            for kind, sites in _grouped(self._products(), self._kind).items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.flops))

    def product_lines(self) -> tuple[ProductLine, ...]:
        """Returns products by dtypes, precision and line, most FLOPs first."""
        groups = _grouped(
            self._products(),
            lambda site: (self._kind(site), self.where(site), _why_not_float8(site)),
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
        """Returns products that were left out of float8 by line and reason, most FLOPs first."""

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
            for (reason, line, path), sites in _grouped(self._products(), key).items()
            if reason
        ]
        return tuple(sorted(rows, key=lambda row: -row.flops))

    def _kind(self, site: Site) -> "_Kind":
        operands, result = _product_dtypes(site)
        return _Kind(operands, result, _precision(site), self._decoded.get(site, ()))

    def upcasts(self) -> tuple[Upcast, ...]:
        """Returns upcasts by line; first those that make products wide, then the rest by size.

        If several upcasts feed a product, the first in the program counts as the cause, since the
        others were widened to match it. Upcasts that cause the most FLOPs come first.
        """
        marked = mark_upcasts(self._program)
        wide = [site for site in self._products() if site.fed_by]
        sources = [site for site in marked if _is_upcast(site, wide)]

        def key(site: Site) -> tuple[Where, Any, str, str]:
            kind = "product" if site.name in PRODUCTS else "cast"
            return self.where(site), kind, _widened_dtype(site), _dtype_of(site.out_avals[0])

        rows: list[tuple[int, Upcast]] = []
        for (where, kind, source, target), sites in _grouped(sources, key).items():
            bits = sum(site.bit for site in sites)
            upcast = Upcast(
                **where._asdict(),
                kind=kind,
                source=source,
                target=target,
                **_counts(sites),
                bytes=sum(_bytes(site.out_avals) * site.runs for site in sites),
                **self._flops(site for site in wide if site.fed_by & bits),
                branch=branch_text(sites),
            )
            caused = _flops(site for site in wide if _first(site.fed_by) & bits)
            rows.append((caused, upcast))
        rows.sort(key=_rank)
        return tuple(upcast for _, upcast in rows)

    def converts(self) -> tuple[Convert, ...]:
        """Returns casts by dtypes, largest first."""

        def key(site: Site) -> tuple[str, str]:
            return _dtype_of(site.in_avals[0]), _dtype_of(site.out_avals[0])

        casts = [site for site in self.sites if site.name in CASTS]
        rows = [
            Convert(
                *dtypes,
                **_counts(sites),
                # Behind the codes of float8 come their scales.
                bytes=sum(_bytes(s.out_avals[:1]) * s.runs for s in sites),
                amax_bytes=sum(
                    _bytes(s.in_avals) * s.runs for s in sites if s.name == "float8_encode"
                ),
            )
            for dtypes, sites in _grouped(casts, key).items()
            if dtypes[0] != dtypes[1]  # such a cast only makes a weak type strong
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def collectives(self) -> tuple[Collective, ...]:
        """Returns collectives by line, largest first."""
        groups: dict[Any, list[tuple[Site, int]]] = collections.defaultdict(list)
        for site in self.sites:
            axes = _mesh_axes(site)
            if not axes:
                continue
            for dtype, avals in _grouped(site.in_avals, _dtype_of).items():
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
        groups = _grouped(self.sites, lambda site: site.name)
        rows = [Equations(name, **_counts(sites)) for name, sites in groups.items()]
        return tuple(sorted(rows, key=lambda row: (-row.count, row.primitive)))

    def recomputed(self) -> tuple[Recomputed, ...]:
        """Returns recomputed equations by line, most operations first; none that only move."""
        again = [
            site
            for site in self.sites
            if not site.bodies and _operations(site) and self.where(site).direction == "recomputed"
        ]
        groups = _grouped(again, lambda site: (self.where(site).line, self.where(site).path))
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
        groups = _grouped(self._products(), lambda site: (_product_dtypes(site)[0], site.branches))
        return tuple(
            Work(operands, sum(site.flops * site.runs for site in sites), branches)
            for (operands, branches), sites in groups.items()
        )

    def unseen(self, sites: Iterable[Site]) -> tuple[Unseen, ...]:
        """Returns the rows of unseen equations by primitive, dtypes and line, in program order."""

        def key(site: Site) -> tuple[str, tuple[str, ...], Where]:
            return site.name, _taken_in(site), self.where(site)

        return tuple(
            Unseen(name, dtypes, **where._asdict(), count=len(same), branch=branch_text(same))
            for (name, dtypes, where), same in _grouped(sites, key).items()
        )

    def where(self, site: Site) -> Where:
        """Returns the line, the module path and the direction of an equation."""
        if site not in self._where:
            scopes = scopes_of(site)
            self._where[site] = Where(self._lines.of(site), module_path(scopes), direction(scopes))
        return self._where[site]

    def _products(self) -> list[Site]:
        return [site for site in self.sites if site.name in PRODUCTS]

    def _flops(self, sites: Iterable[Site]) -> dict[str, Any]:
        flops = _flops(sites)
        return {"flops": flops, "share": flops / self.flops if self.flops else 0.0}


def _why_not_float8(site: Site) -> str:
    """Returns why a float8 policy or its recipe left a product out; empty for other products."""
    outer = site.outer.equation.params if site.outer is not None else {}
    form: Any = outer.get("form")
    recipe = getattr(form, "recipe", None)
    if any(name.startswith(FLOAT8) for name in _product_dtypes(site)[0]):
        return ""  # a rule puts it in float8, though the module around it is left out
    if recipe is None or recipe.weight_gradient == "float8" or outer["returned"] != form.parameter:
        return why_left_out(scopes_of(site))
    return f"{recipe} has gradients of weights in {recipe.weight_gradient}"


def _flops(sites: Iterable[Site]) -> int:
    """Returns the FLOPs of products; of exclusive branches, counts those with the most."""
    return most(Part(site.branches, 0, site.flops * site.runs) for site in sites if site.flops)


def _operations(site: Site) -> int:
    """Returns how many operations an equation takes: about one for each number it computes."""
    if site.flops or CLASSES.get(site.name) is OpClass.MOVE:
        return site.flops
    sizes = [math.prod(getattr(x, "shape", ())) for x in (*site.in_avals, *site.out_avals)]
    return max(sizes, default=0)  # a debug message may have no operands and no results


def _taken_in(site: Site) -> tuple[str, ...]:
    """Returns the dtypes of the operands; for a while loop, of the operands of its products."""
    inside = [each for body in site.bodies for each in all_sites(body) if each.name in PRODUCTS]
    names = [name for each in inside for name in _product_dtypes(each)[0]]
    return tuple(sorted({*names} if inside else set(map(_dtype_of, site.in_avals))))


_MOST_BRANCHES = 3


def branch_text(sites: Iterable[Site]) -> str:
    """Formats the branches around equations; empty if an equation is outside of all branches.

    >>> branch_text([])
    ''
    """
    paths = dict.fromkeys(site.branches for site in sites)
    if () in paths:
        return ""
    texts = list(dict.fromkeys(" / ".join(choice.name for choice in path) for path in paths))
    more = len(texts) - _MOST_BRANCHES
    return "; ".join(texts[:_MOST_BRANCHES] + ([f"{more} more"] if more > 0 else []))


def _is_upcast(site: Site, wide: list[Site]) -> bool:
    """Whether to report a source; products only if they are the cause of wide products."""
    if site.name not in PRODUCTS:
        return True
    if widens_inside(site):
        return site.fed_by == site.bit
    return any(other.fed_by & site.bit for other in wide)


def _rank(row: tuple[int, Upcast]) -> tuple[int, int, int]:
    """Returns the sort key of an upcast; the sort keeps program order among equals."""
    caused, upcast = row
    return -caused, 0 if caused else -upcast.flops, 0 if upcast.flops else -upcast.bytes


def _first(bits: int) -> int:
    """Returns the lowest bit."""
    return bits & -bits


def _widened_dtype(site: Site) -> str:
    """Returns the dtype of the operand that is widened."""
    operands = site.in_avals[: 2 if site.name in PRODUCTS else 1]
    return next(_dtype_of(x) for x in operands if is_narrow_aval(x) or not is_wide(x))


def _product_dtypes(site: Site) -> tuple[tuple[str, str], str]:
    left, right = map(_dtype_of, site.in_avals[:2])
    return (left, right), _dtype_of(site.out_avals[0])


def _precision(site: Site) -> str:
    """Returns the precision that a float32 product asks for; empty for other products."""
    if "float32" not in _product_dtypes(site)[0]:
        return ""
    return name_of_param(site.equation.params.get("precision"))


def _dtype_of(aval: Any) -> str:
    return str(getattr(aval, "dtype", "none"))


def _bytes(avals: Iterable[Any]) -> int:
    return sum(map(nbytes_of, avals))


def _mesh_axes(site: Site) -> tuple[str, ...]:
    """Returns the mesh axes of a collective; none for other equations or for vmap axes."""
    if site.name.removesuffix("_start") not in COLLECTIVES:
        return ()
    params = site.equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    return tuple(
        str(a) for a in (axes if isinstance(axes, tuple) else (axes,)) if not isinstance(a, int)
    )


def _counts(sites: list[Site]) -> dict[str, Any]:
    return {"count": len(sites), "runs": sum(site.runs for site in sites)}


def _grouped(items: Iterable[Any], key: Callable[[Any], _Key]) -> dict[_Key, list[Any]]:
    groups: dict[_Key, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
