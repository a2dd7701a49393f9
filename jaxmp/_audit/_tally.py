"""Makes the rows of a report of the equations of a program."""

import collections
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxmp._audit._branches import Part, most
from jaxmp._audit._lines import Lines, direction, module_path, scopes_of
from jaxmp._audit._rows import (
    Collective,
    Convert,
    Equations,
    Product,
    ProductLine,
    Recomputed,
    Unseen,
    Upcast,
    Work,
)
from jaxmp._audit._upcasts import is_narrow, is_wide, widens_inside
from jaxmp._audit._walk import Site
from jaxmp._flops import PRODUCTS
from jaxmp._op_lists import CLASSES, OpClass

_Key = TypeVar("_Key", bound=Hashable)

_COLLECTIVES = (
    *("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin", "unreduced_pmax"),
    *("unreduced_pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"),
    *("reduce_scatter", "unreduced_reduce_scatter", "all_to_all", "ragged_all_to_all"),
    *("ppermute", "pbroadcast", "pbroadcast_dynamic", "psend"),
)


class Where(NamedTuple):
    """Where an equation comes from."""

    line: str
    path: str
    direction: str


class Tally:
    """Groups equations into rows.

    Args:
      sites: all equations.
      sources: those that may be upcasts, as `mark_upcasts` found them.
    """

    def __init__(self, sites: Iterable[Site], sources: list[Site]) -> None:
        self.sites = list(sites)
        self.sources = sources
        self.flops = _flops(self.sites)
        self._lines = Lines()
        self._where: dict[Site, Where] = {}

    def products(self) -> tuple[Product, ...]:
        """By dtypes, the most FLOPs first."""
        groups = _grouped(self._products(), _dtypes)
        rows = [
            Product(operands=operands, result=result, **_counts(sites), **self._flops(sites))
            for (operands, result), sites in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.flops))

    def product_lines(self) -> tuple[ProductLine, ...]:
        """By dtypes and line, the most FLOPs first."""
        groups = _grouped(self._products(), lambda site: (_dtypes(site), self.where(site)))
        rows = [
            ProductLine(
                operands=operands,
                result=result,
                **_counts(sites),
                **self._flops(sites),
                **where._asdict(),
                branch=branch_text(sites),
            )
            for ((operands, result), where), sites in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.flops))

    def upcasts(self) -> tuple[Upcast, ...]:
        """By line; first those that cost FLOPs of wide products, then by size.

        Of several upcasts that feed a product, the first one in the program is taken for its
        cause, since the others were widened to meet it; what causes most comes first.
        """
        wide = [site for site in self._products() if site.fed_by]
        sources = [site for site in self.sources if _is_upcast(site, wide)]

        def key(site: Site) -> tuple[Where, Any, str, str]:
            kind = "product" if site.name in PRODUCTS else "cast"
            return self.where(site), kind, _source(site), _dtype(site.equation.outvars[0])

        rows: list[tuple[int, Upcast]] = []
        for (where, kind, source, target), sites in _grouped(sources, key).items():
            bits = sum(site.bit for site in sites)
            upcast = Upcast(
                **where._asdict(),
                kind=kind,
                source=source,
                target=target,
                **_counts(sites),
                bytes=sum(_bytes(site.equation.outvars) * site.runs for site in sites),
                **self._flops(site for site in wide if site.fed_by & bits),
                branch=branch_text(sites),
            )
            caused = _flops(site for site in wide if _first(site.fed_by) & bits)
            rows.append((caused, upcast))
        rows.sort(key=_rank)
        return tuple(upcast for _, upcast in rows)

    def converts(self) -> tuple[Convert, ...]:
        """By dtypes, the largest first."""

        def key(site: Site) -> tuple[str, str]:
            return _dtype(site.equation.invars[0]), _dtype(site.equation.outvars[0])

        casts = [site for site in self.sites if site.name == "convert_element_type"]
        rows = [
            Convert(
                *dtypes,
                **_counts(sites),
                bytes=sum(_bytes(s.equation.outvars) * s.runs for s in sites),
            )
            for dtypes, sites in _grouped(casts, key).items()
            if dtypes[0] != dtypes[1]  # such a cast only makes a weak type strong
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def collectives(self) -> tuple[Collective, ...]:
        """By line, the largest first."""
        groups: dict[Any, list[tuple[Site, int]]] = collections.defaultdict(list)
        for site in self.sites:
            axes = _axes(site)
            if not axes:
                continue
            for dtype, variables in _grouped(site.equation.invars, _dtype).items():
                key = (site.name, axes, dtype), self.where(site)
                groups[key].append((site, _bytes(variables)))
        rows = [
            Collective(
                name=name,
                axes=axes,
                dtype=dtype,
                **where._asdict(),
                **_counts([site for site, _ in found]),
                bytes=sum(site.runs * size for site, size in found),
                branch=branch_text([site for site, _ in found]),
            )
            for ((name, axes, dtype), where), found in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def equations(self) -> tuple[Equations, ...]:
        """By primitive, the most frequent first."""
        groups = _grouped(self.sites, lambda site: site.name)
        rows = [Equations(name, **_counts(sites)) for name, sites in groups.items()]
        return tuple(sorted(rows, key=lambda row: (-row.count, row.primitive)))

    def recomputed(self) -> tuple[Recomputed, ...]:
        """By line, what costs most first."""
        again = [
            site
            for site in self.sites
            if not site.bodies and self.where(site).direction == "recomputed"
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
        """The FLOPs of products by dtypes and branches."""
        groups = _grouped(self._products(), lambda site: (_dtypes(site)[0], site.branches))
        return tuple(
            Work(operands, sum(site.flops * site.runs for site in sites), branches)
            for (operands, branches), sites in groups.items()
        )

    def unseen(self, sites: Iterable[Site]) -> tuple[Unseen, ...]:
        """By primitive, dtypes and line, in the order of the program."""

        def key(site: Site) -> tuple[str, tuple[str, ...], Where]:
            return site.name, _taken_in(site), self.where(site)

        return tuple(
            Unseen(name, dtypes, **where._asdict(), count=len(found), branch=branch_text(found))
            for (name, dtypes, where), found in _grouped(sites, key).items()
        )

    def where(self, site: Site) -> Where:
        """The line, the module path and the direction of an equation."""
        if site not in self._where:
            scopes = scopes_of(site)
            self._where[site] = Where(self._lines.of(site), module_path(scopes), direction(scopes))
        return self._where[site]

    def _products(self) -> list[Site]:
        return [site for site in self.sites if site.name in PRODUCTS]

    def _flops(self, sites: Iterable[Site]) -> dict[str, Any]:
        flops = _flops(sites)
        return {"flops": flops, "share": flops / self.flops if self.flops else 0.0}


def _flops(sites: Iterable[Site]) -> int:
    """Those of some products: of branches that exclude each other, where they are most."""
    return most(Part(site.branches, 0, site.flops * site.runs) for site in sites if site.flops)


def _operations(site: Site) -> int:
    """How many numbers an equation computes, or reads to add them up."""
    if site.flops or CLASSES.get(site.name) is OpClass.MOVE:
        return site.flops
    variables = (*site.equation.invars, *site.equation.outvars)
    sizes = [math.prod(getattr(variable.aval, "shape", ())) for variable in variables]
    return max(sizes, default=0)  # of a message, which may have neither


def _taken_in(site: Site) -> tuple[str, ...]:
    """The dtypes of what goes into an equation; of a while loop, of what it multiplies."""
    inside = [each for body in site.bodies for each in body.all_sites() if each.name in PRODUCTS]
    names = [name for each in inside for name in _dtypes(each)[0]]
    return tuple(sorted({*names} if inside else {_dtype(v) for v in site.equation.invars}))


_MOST_BRANCHES = 3


def branch_text(sites: Iterable[Site]) -> str:
    """The branches that equations are in; none if one of them is in no branch.

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
    """Whether a source is a finding: a product is one only as the first cause of wide products."""
    if site.name not in PRODUCTS:
        return True
    if widens_inside(site):
        return site.fed_by == site.bit
    return any(other.fed_by & site.bit for other in wide)


def _rank(row: tuple[int, Upcast]) -> tuple[int, int, int]:
    """The order of upcasts; among equals it is that of the program."""
    caused, upcast = row
    return -caused, 0 if caused else -upcast.flops, 0 if upcast.flops else -upcast.bytes


def _first(bits: int) -> int:
    """The lowest bit."""
    return bits & -bits


def _source(site: Site) -> str:
    """The dtype that is widened."""
    operands = site.equation.invars[:2] if site.name in PRODUCTS else site.equation.invars[:1]
    return next(_dtype(v) for v in operands if is_narrow(v.aval) or not is_wide(v.aval))


def _dtypes(site: Site) -> tuple[tuple[str, str], str]:
    left, right = site.equation.invars[:2]
    return (_dtype(left), _dtype(right)), _dtype(site.equation.outvars[0])


def _dtype(variable: Any) -> str:
    return str(getattr(variable.aval, "dtype", "none"))


def _bytes(variables: Iterable[Any]) -> int:
    return sum(bytes_of(variable.aval) for variable in variables)


def bytes_of(array: Any) -> int:
    """The size of anything with a shape and a dtype; 0 for anything else.

    >>> bytes_of(np.zeros((2, 3), np.float32))
    24
    """
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        return 0
    return int(np.prod(array.shape, dtype=np.int64)) * int(array.dtype.itemsize)


def _axes(site: Site) -> tuple[str, ...]:
    """The mesh axes of a collective; none for other equations, and under vmap."""
    if site.name.removesuffix("_start") not in _COLLECTIVES:
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
