"""The number of floating-point operations of a compiled program."""

from typing import Any

from lab.operations import hlo_product_flops


def compiled_flops(compiled: Any) -> float:
    """The operations of a program on one device.

    For a TPU the compiler's own count, which has the body of each loop once. The compiler for GPUs
    has none: there two for each multiply-add of a matrix product, times the turns of its loop.
    """
    cost = compiled.cost_analysis()
    return (
        float(cost["flops"]) if cost else sum(hlo_product_flops(str(compiled.as_text())).values())
    )
