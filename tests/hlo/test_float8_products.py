"""Which products of a compiled program are float8: real programs, cut down.

Each is the gradient of three layers of 512 x 512 in a scan and a last one of 40 columns, under
`mixed_float8`: for an H100 as cuBLAS calls, the same for a target without a CUDA version (XLA then
knows of no float8 product), for an H100 with Triton, and for a TPU v5e.
"""

import pathlib

import pytest

from jaxmp._tools.hlo.collectives import read_program
from jaxmp._tools.hlo.products import HloCodeProduct
from tests.support import hlo_texts

pytestmark = pytest.mark.jax

HLO = pathlib.Path(__file__).parent / "programs" / "float8"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def read(name: str) -> tuple[HloCodeProduct, ...]:
    return read_program((HLO / f"{name}.txt").read_text()).float8


def rows(name: str) -> set[tuple[tuple[str, str], str, str]]:
    return {(each.operands, each.result, each.ran) for each in read(name)}


def test_calls_of_cublas_are_float8() -> None:
    """Forward and both backward products, of all turns of the loop; not those of the last layer."""
    assert rows("cublas") == {
        ((E4M3, E4M3), "bfloat16", "float8"),
        ((E5M2, E4M3), "bfloat16", "float8"),
        ((E4M3, E5M2), "float32", "float8"),
    }
    assert [each.runs for each in read("cublas")] == [3, 3, 3]


def test_widened_operands_are_seen_behind_casts() -> None:
    """XLA drops the rounding of operands that it made itself; the other operand shows it."""
    assert rows("widened") == {
        (("bfloat16", E4M3), "bfloat16", "widened to bfloat16"),
        ((E4M3, "float16"), "float32", "widened to float16"),
    }
    assert len(read("widened")) == 3


def test_fusions_of_a_gpu_may_do_anything() -> None:
    """Kernels for the same text had instructions for float8, or for float16."""
    found = read("fusions")
    assert len(found) == 3
    assert {each.ran for each in found} == {"not known"}


def test_fusions_of_a_tpu_are_its_products() -> None:
    found = read("tpu")
    assert len(found) == 3
    assert {each.ran for each in found} == {"float8 operands"}


def program(*lines: str) -> tuple[HloCodeProduct, ...]:
    given = "%x = f8e4m3fn[8,8] parameter(0)", "%w = f8e4m3fn[8,8] parameter(1)"
    return hlo_texts.program(*given, *lines).float8


DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("lines", "ran"),
    [
        ([f"%out = f32[8,8] dot(%x, %w), {DOT}"], ["float8 operands"]),
        (["%out = f32[8,8] convolution(%x, %w), dim_labels=bf_io->bf"], ["float8 operands"]),
        (
            [
                "%wide = bf16[8,8] convert(%w)",
                "%scale = bf16[8,8] parameter(2)",
                "%scaled = bf16[8,8] multiply(%scale, %wide)",
                f"%out = f32[8,8] dot(%x, %scaled), {DOT}",
            ],
            ["widened to bfloat16"],
        ),
        # The result of a product is no operand that was widened.
        (
            [
                f"%made = bf16[8,8] dot(%x, %w), {DOT}",
                f"%out = bf16[8,8] dot(%made, %made), {DOT}",
            ],
            ["float8 operands"],
        ),
        (
            ['%out = f8e4m3fn[8,8] custom-call(%x, %w), custom_call_target="__cudnn$convForward"'],
            ["not known"],
        ),
        (['%out = f8e4m3fn[8,8] custom-call(%x), custom_call_target="Sharding"'], []),
        (["%out = f8e4m3fn[8,8] add(%x, %w)"], []),
    ],
)
def test_each_way_to_write_a_product(lines: list[str], ran: list[str]) -> None:
    assert [each.ran for each in program(*lines)] == ran
