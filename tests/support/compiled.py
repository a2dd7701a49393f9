"""What the text of a compiled program says about its products."""

import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.lab.kernels import Schedule
from jaxmp._tools.hlo.parser import Instruction, Module
from tests.support.traffic import Traffic

# A call of cuBLAS that multiplies float8 operands as they are.
_FLOAT8_CALL = 'custom_call_target="__cublas$lt$matmul$f8"'


def float8_calls(text: str) -> list[Instruction]:
    """The calls that multiply in float8, on a GPU; each body of a loop once.

    A fusion with float8 operands is none: its kernel may widen them before it multiplies. So tests
    compile with `WITHOUT_TRITON`.
    """
    return [
        instruction
        for computation in Module(text).computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "custom-call" and _FLOAT8_CALL in instruction.structure
    ]


# Compiler options with which a GPU's matrix products are calls of cuBLAS.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def products_in(text: str) -> list[tuple[set[str], str, str]]:
    """The dtypes of operands and result of each product, and the rest of its line."""
    text = re.sub(r"/\*index=\d+\*/", "", text)
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    product = r" = (\w+)\[\S* (?:dot|convolution)\(([^)]*)\)([^\n]*)"
    return [
        ({dtypes[name] for name in re.findall(r"%([\w.\-]+)", operands)}, result, rest)
        for result, operands, rest in re.findall(product, text)
    ]


def cycles(text: str) -> int:
    """How long a TPU's compiler expects the program to take, with each body of a loop once."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


class Beside(NamedTuple):
    """Bytes and launches beside the matrix products, and the bytes of these without work space."""

    bytes: int
    launches: int
    products: int


def beside_products(program: str) -> Beside:
    """Splits the traffic of a program: products, and the rest.

    Products are calls of cuBLAS, as in programs compiled `WITHOUT_TRITON`, and products of blocks.
    """
    module = Module(program)
    traffic = Traffic(module)
    moved, launches, products = 0.0, 0, 0.0
    for instruction, times in Schedule(module, traffic.bytes).kernels():
        total = times * traffic.bytes(instruction)
        if "__cublas" in instruction.structure or "scaled-dot" in instruction.structure:
            products += total
        else:
            moved, launches = moved + total, launches + times
    return Beside(round(moved), launches, round(products))


def after_partitioning(function: Callable[..., Any], *args: Any) -> str:
    """The program right after partitioning: later, XLA:CPU makes all 16-bit collectives float32.

    It is compiled anew: a program that was kept from an earlier run writes nothing.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # reads the setting again
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
            jax.jit(function).lower(*args).compile(options)
            (path,) = pathlib.Path(folder).glob("*after_spmd-partitioning*.txt")
            return path.read_text()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
