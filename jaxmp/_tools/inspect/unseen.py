"""Lists what a jaxpr does not show about a program: as sentences, and by line."""

import collections
from collections.abc import Callable, Iterable

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._program.op_classes import (
    CLASSES,
    FOREIGN_CALLS,
    LINEAR_ALGEBRA,
    OPAQUE,
    PRODUCTS,
    OpClass,
)
from jaxmp._tools.inspect.equations import Site, all_sites

# Parts of names: libraries add primitives of these kinds.
_KERNELS = ("dot_product_attention", "mosaic_gpu", "wgmma")
_CALLBACKS = ("callback", "debug_print", "outside_call")
# Primitives that an audit understands fully: their dtypes say everything.
# A `call_hi_primitive` runs a primitive of another library.
_UNDERSTOOD = {*CLASSES, "convert_element_type"} - {"call_hi_primitive"}


def _is_foreign(site: Site) -> bool:
    """Whether it is an operation of another library without a program to look into."""
    if site.name in FOREIGN_CALLS:
        return True
    # Control flow without bodies hides its program: a call of another library.
    holds_programs = CLASSES.get(site.name) is OpClass.CONTROL
    return not site.bodies and (site.name not in _UNDERSTOOD or holds_programs)


def _is_callback(site: Site) -> bool:
    return any(part in site.name for part in _CALLBACKS)


# The first rule that holds names the kind of an equation; the last one catches the unknown.
_HIDDEN: tuple[tuple[Callable[[Site], bool], str, str], ...] = (
    (
        lambda site: site.name in OPAQUE or site.name.startswith(_KERNELS),
        "kernels",
        "what they multiply",
    ),
    (_is_callback, "callbacks", "what the host does"),
    (
        lambda site: site.name in LINEAR_ALGEBRA or site.name == "fft",
        "linear algebra",
        "what it multiplies",
    ),
    (_is_foreign, "foreign calls", "what they do"),
)


def _hidden_kind(site: Site) -> int | None:
    """Returns the index in `_HIDDEN` of an equation that an audit cannot look into, or None."""
    return next((i for i, (belongs, *_) in enumerate(_HIDDEN) if belongs(site)), None)


def hiding(sites: Iterable[Site]) -> list[Site]:
    """Returns the equations with possible products that the report does not count.

    They are kernels, foreign calls, linear algebra, callbacks whose results the program uses, and
    while loops with products. Excluded are Fourier transforms, which multiply no matrices, and
    equations without floats, such as the checks of Equinox.
    """
    return [site for site in sites if _hides(site)]


def _hides(site: Site) -> bool:
    # A while loop: its products are counted once, however often they run.
    if site.wiring.turns is None:
        return any(inner.flops for body in site.bodies for inner in all_sites(body))
    only_looks = _is_callback(site) and not site.equation.outvars
    # Flags and indices are no numbers to multiply. A value without a dtype may be anything.
    avals = (*site.in_avals, *site.out_avals)
    has_numbers = any(is_inexact(aval) or getattr(aval, "dtype", None) is None for aval in avals)
    harmless = only_looks or site.name == "fft" or not has_numbers
    return _hidden_kind(site) is not None and not harmless


def unseen_in(sites: Iterable[Site], *, is_compiled: bool = False) -> tuple[str, ...]:
    """Returns sentences about what a report leaves out, which may have a compiled program too."""
    sites = list(sites)
    counts = collections.Counter(site.name for site in sites)
    sentences = []
    if not is_compiled:
        sentences.append(
            "Collectives that the compiler's partitioner inserts for sharded arrays are only in "
            "the compiled program; listed are those that the program itself asks for. Whether "
            "TPUs sum in float32 shows only in a program that is compiled for TPUs."
        )
    if any(name in PRODUCTS for name in counts):
        sentences.append(
            "In which dtype a product sums up inside is the compiler's choice; a bfloat16 product "
            "is usually summed in float32 and rounded once."
        )
    if loops := sum(site.wiring.turns is None for site in sites):
        sentences.append(
            f"while loops ({loops}): how often they run is not known; condition and body "
            "are counted once."
        )
    if conditionals := sum(site.wiring.chooses for site in sites):
        sentences.append(
            f"branches of cond and switch ({conditionals}): which of them runs is not known. All "
            "are counted; a number of FLOPs is that of the branches where it is largest."
        )
    kinds = collections.defaultdict[int | None, dict[str, int]](dict)
    for site in sites:
        kinds[_hidden_kind(site)][site.name] = counts[site.name]
    for i, (_, kind, content) in enumerate(_HIDDEN):
        if names := kinds.get(i):
            numbers = ", ".join(f"{n} {name}" for name, n in sorted(names.items()))
            sentences.append(f"{kind} ({numbers}): {content} is not counted.")
    return tuple(sentences)
