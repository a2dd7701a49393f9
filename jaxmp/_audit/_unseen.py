"""What a jaxpr does not show, in sentences that hold for the program at hand."""

import collections
from collections.abc import Iterable

from jaxmp._audit._flops import PRODUCTS
from jaxmp._audit._walk import OPAQUE, Site

_FOREIGN = ("ffi_call", "custom_call", "triton_kernel_call", "cudnn_fusion", "call_exported")
_KERNELS = ("dot_product_attention", "mosaic_gpu", "wgmma")
_CALLBACKS = ("callback", "debug_print", "outside_call")
_ALGEBRA = (
    *("fft", "lu", "cholesky", "qr", "eig", "eigh", "svd", "triangular_solve", "schur"),
    *("householder_product", "tridiagonal", "tridiagonal_solve", "hessenberg", "geqrf"),
)


def unseen_in(sites: Iterable[Site], *, is_compiled: bool = False) -> tuple[str, ...]:
    """Sentences about what the report leaves out.

    Args:
      sites: all equations.
      is_compiled: whether the report has the collectives of the compiled program, too.

    Returns:
      The sentences. That of the partitioner holds for every program that was only traced.
    """
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
            f"branches of cond and switch ({counts['cond']}): only the branch with the most "
            "product FLOPs is looked into."
        )
    inside = [
        (lambda name: name in OPAQUE or name.startswith(_KERNELS), "kernels", "what they multiply"),
        (lambda name: name in _FOREIGN, "foreign calls", "what they do"),
        (lambda name: any(part in name for part in _CALLBACKS), "callbacks", "what the host does"),
        (lambda name: name in _ALGEBRA, "linear algebra", "what it multiplies"),
    ]
    for belongs, what, is_missing in inside:
        if found := {name: n for name, n in counts.items() if belongs(name)}:
            listed = ", ".join(f"{n} {name}" for name, n in sorted(found.items()))
            sentences.append(f"{what} ({listed}): {is_missing} is not counted.")
    return tuple(sentences)
