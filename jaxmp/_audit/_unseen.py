"""What a jaxpr does not show: in sentences that hold for the program at hand, and by line."""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from jaxmp._audit._rows import Unseen
from jaxmp._audit._walk import Site
from jaxmp._flops import OPAQUE, PRODUCTS
from jaxmp._op_lists import CLASSES, OpClass

_FOREIGN = ("ffi_call", "custom_call", "triton_kernel_call", "cudnn_fusion", "call_exported")
_KERNELS = ("dot_product_attention", "mosaic_gpu", "wgmma")
_CALLBACKS = ("callback", "debug_print", "outside_call")
_ALGEBRA = (
    *("fft", "lu", "cholesky", "cholesky_update", "qr", "ormqr", "eig", "eigh", "svd", "schur"),
    *("triangular_solve", "householder_product", "tridiagonal", "tridiagonal_solve", "hessenberg"),
    *("geqrf", "geqp3", "symmetric_product"),
)
# Of these an audit reads the dtypes, and what it says of them is all there is to say.
_KNOWN = {*CLASSES, *PRODUCTS, "convert_element_type"} - {"call_hi_primitive"}


def _is_foreign(site: Site) -> bool:
    """Whether it is an operation of another library, in which there is no program to look into."""
    if site.name in _FOREIGN:
        return True
    holds_programs = CLASSES.get(site.name) is OpClass.CONTROL
    return not site.bodies and (site.name not in _KNOWN or holds_programs)


def _is_callback(site: Site) -> bool:
    return any(part in site.name for part in _CALLBACKS)


def _is_kernel(site: Site) -> bool:
    return site.name in OPAQUE or site.name.startswith(_KERNELS)


_INSIDE: tuple[tuple[Callable[[Site], bool], str, str], ...] = (
    (_is_kernel, "kernels", "what they multiply"),
    (_is_callback, "callbacks", "what the host does"),
    (lambda site: site.name in _ALGEBRA, "linear algebra", "what it multiplies"),
    (_is_foreign, "foreign calls", "what they do"),
)


def _kind(site: Site) -> int | None:
    """Which kind of equation it is that is not looked into, if it is one."""
    return next((i for i, (belongs, *_) in enumerate(_INSIDE) if belongs(site)), None)


def hiding(sites: Iterable[Site]) -> list[Site]:
    """The equations that may multiply something which the report does not count.

    Kernels, foreign calls, linear algebra, callbacks whose results the program uses, and while
    loops with products in them. Not so a Fourier transform, which multiplies no matrices, and what
    has no floats, such as the checks of Equinox.
    """
    return [site for site in sites if _hides(site)]


def _hides(site: Site) -> bool:
    if site.name == "while":
        return _multiplies(site)
    only_looks = _is_callback(site) and not site.equation.outvars
    known = only_looks or site.name == "fft" or not _has_numbers(site)
    return _kind(site) is not None and not known


def _has_numbers(site: Site) -> bool:
    """Whether there is something to multiply: flags and indices are not."""
    atoms = (*site.equation.invars, *site.equation.outvars)
    dtypes = [getattr(atom.aval, "dtype", None) for atom in atoms]
    return any(dtype is None or jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def _multiplies(site: Site) -> bool:
    return any(each.flops for body in site.bodies for each in body.all_sites())


def are_sharded(arrays: Iterable[Any], sites: Iterable[Site]) -> bool:
    """Whether the partitioner may put collectives into a program."""
    given = [getattr(array, "sharding", None) for array in arrays]
    asked = [site.equation.params["sharding"] for site in sites if site.name == _CONSTRAINT]
    return any(getattr(sharding, "num_devices", 1) > 1 for sharding in (*given, *asked))


_CONSTRAINT = "sharding_constraint"
# The sums that it puts in are equations of no program.
PARTITIONER = Unseen("partitioner", (), "", "", "", count=1, branch="")


def unseen_in(sites: Iterable[Site], *, is_compiled: bool = False) -> tuple[str, ...]:
    """Sentences about what the report leaves out.

    Args:
      sites: all equations.
      is_compiled: whether the report has the collectives of the compiled program, too.

    Returns:
      The sentences. That of the partitioner holds for every program that was only traced.
    """
    sites = list(sites)
    counts = collections.Counter(site.name for site in sites)
    sentences = []
    if not is_compiled:
        sentences.append(
            "Collectives that the compiler's partitioner inserts for sharded arrays are only in "
            "the compiled program; listed are those that the program itself asks for."
        )
    if any(name in PRODUCTS for name in counts):
        sentences.append(
            "In which dtype a product sums up inside is the compiler's choice; a bfloat16 product "
            "is usually summed in float32 and rounded once."
        )
    if counts["while"]:
        sentences.append(
            f"while loops ({counts['while']}): how often they run is not known; condition and body "
            "are counted once."
        )
    if counts["cond"]:
        sentences.append(
            f"branches of cond and switch ({counts['cond']}): which of them runs is not known. All "
            "are counted; a number of FLOPs is that of the branches where it is largest."
        )
    kinds = collections.defaultdict[int | None, dict[str, int]](dict)
    for site in sites:
        kinds[_kind(site)][site.name] = counts[site.name]
    for i, (_, what, is_missing) in enumerate(_INSIDE):
        if found := kinds.get(i):
            listed = ", ".join(f"{n} {name}" for name, n in sorted(found.items()))
            sentences.append(f"{what} ({listed}): {is_missing} is not counted.")
    return tuple(sentences)
