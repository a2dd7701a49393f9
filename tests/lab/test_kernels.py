"""What a program runs and how often, its traffic and its products, on programs counted by hand."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from benchmarks.lab.kernels import Schedule, estimated_cycles
from benchmarks.lab.operations import hlo_product_flops, products_of
from jaxmp._tools.hlo.parser import Instruction, Module
from tests.support.traffic import Traffic, traffic

# A loop of five turns, each of which multiplies, reads one layer of a stack and writes another.
TURNS = 'backend_config={"known_trip_count":{"n":"5"}}'
STATE = "(s32[], f32[64,64], f32[5,64,64], f32[5,64,64])"
LOOP = """\
HloModule loop

%sliced (p0: f32[5,64,64], p1: s32[]) -> f32[64,64] {
  %p0 = f32[5,64,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = f32[1,64,64]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %flat = f32[64,64]{1,0} bitcast(%layer)
}

%updated (p0: f32[5,64,64], p1: f32[64,64], p2: s32[]) -> f32[5,64,64] {
  %p0 = f32[5,64,64]{2,1,0} parameter(0)
  %p1 = f32[64,64]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,64,64]{2,1,0} bitcast(%p1)
  ROOT %all = f32[5,64,64]{2,1,0} dynamic-update-slice(%p0, %one, %p2, %zero, %zero)
}

%body (state: STATE) -> STATE {
  %state = STATE parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[64,64]{1,0} get-tuple-element(%state), index=1
  %stack = f32[5,64,64]{2,1,0} get-tuple-element(%state), index=2
  %kept = f32[5,64,64]{2,1,0} get-tuple-element(%state), index=3
  %w = f32[64,64]{1,0} fusion(%stack, %i), kind=kLoop, calls=%sliced
  %y = f32[64,64]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %new = f32[5,64,64]{2,1,0} fusion(%kept, %y, %i), kind=kLoop, calls=%updated
  ROOT %next = STATE tuple(%i, %y, %stack, %new)
}

%condition (state: STATE) -> pred[] {
  %state = STATE parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (x: f32[64,64], stack: f32[5,64,64], kept: f32[5,64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %stack = f32[5,64,64]{2,1,0} parameter(1)
  %kept = f32[5,64,64]{2,1,0} parameter(2)
  %zero = s32[] constant(0)
  %start = STATE tuple(%zero, %x, %stack, %kept)
  %loop = STATE while(%start), condition=%condition, body=%body, TURNS
  ROOT %y = f32[64,64]{1,0} get-tuple-element(%loop), index=1
}
""".replace("STATE", STATE).replace("TURNS", TURNS)
LAYER = 64 * 64 * 4


def entry(*lines: str, before: str = "") -> str:
    body = textwrap.indent("\n".join(lines), "  ")
    return f"HloModule made\n\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


def only(text: str, opcode: str) -> tuple[Module, Instruction]:
    module = Module(text)
    (found,) = (
        each
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.opcode == opcode
    )
    return module, found


def test_a_loop_counts_with_its_turns() -> None:
    kernels = Schedule(Module(LOOP), lambda _: 1.0).kernels()
    assert [(each.instruction.name, each.times) for each in kernels] == [
        ("w", 5),
        ("y", 5),
        ("new", 5),
    ]
    assert hlo_product_flops(LOOP) == {"float32": 5 * 2 * 64**3}


def test_a_loop_touches_one_layer_of_a_stack_in_each_turn() -> None:
    """A layer is read and written, three for the product, and one read and written in the stack."""
    counter = 2 * 4  # both fusions read it
    assert traffic(LOOP) == 5 * ((2 + 3 + 2) * LAYER + counter)
    whole = LOOP.replace("dynamic-slice(", "negate(")  # positive control: the whole stack is read
    assert traffic(whole) == traffic(LOOP) + 5 * 4 * LAYER


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    unknown = LOOP.replace(", " + TURNS, "")
    schedule = Schedule(Module(unknown), lambda _: 1.0)
    assert {each.times for each in schedule.kernels()} == {1}
    assert schedule.unknown_loops == ["loop"]


def test_of_a_conditional_the_branch_counts_that_costs_most() -> None:
    branches = """\
%small (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %one = f32[8]{0} negate(%p)
}

%large (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %first = f32[8]{0} negate(%p)
  ROOT %second = f32[8]{0} exponential(%first)
}
"""
    lines = (
        "%choice = pred[] parameter(0)",
        "%x = f32[8]{0} parameter(1)",
        "ROOT %y = f32[8]{0} conditional(%choice, %x, %x), true_computation=%small, "
        "false_computation=%large",
    )
    schedule = Schedule(Module(entry(*lines, before=branches)), lambda _: 1.0)
    assert [each.instruction.name for each in schedule.kernels()] == ["first", "second"]
    dear = Schedule(
        Module(entry(*lines, before=branches)), lambda each: 9.0 if each.name == "one" else 1.0
    )
    assert [each.instruction.name for each in dear.kernels()] == ["one"]


def test_names_and_ends_of_copies_do_no_work() -> None:
    text = entry(
        "%x = f32[8]{0} parameter(0)",
        "%s = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%x)",
        "%d = f32[8]{0:S(1)} copy-done(%s)",
        '%b = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "ROOT %y = f32[8]{0} negate(%d)",
    )
    kernels = Schedule(Module(text), lambda _: 1.0).kernels()
    assert [each.instruction.name for each in kernels] == ["s", "y"]
    assert traffic(text) == 32 + 32  # the copy reads, the negation writes; the rest is near


def test_the_padding_of_tiles_is_moved_too() -> None:
    text = entry(
        "%x = f32[3,100]{1,0:T(8,128)} parameter(0)",
        "ROOT %y = f32[3,100]{1,0} negate(%x)",
    )
    assert traffic(text) == 4 * (8 * 128 + 3 * 100)


def test_work_space_of_a_library_is_no_traffic() -> None:
    call = (
        "%y = (bf16[32,16]{1,0}, s8[4096]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
        '"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}}'
    )
    text = entry("%a = bf16[32,64]{1,0} parameter(0)", "%b = bf16[64,16]{1,0} parameter(1)", call)
    assert traffic(text) == 2 * (32 * 64 + 64 * 16 + 32 * 16)
    (product,) = products_of(*only(text, "custom-call"))
    assert product == ("bfloat16", "highest", 2.0 * 32 * 16 * 64)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "precision", "factor"),
    [
        ("dot_bf16_bf16_f32", "bfloat16", "default", 1),
        ("dot_bf16_bf16_f32_x6", "bfloat16", "default", 6),
        ("dot_tf32_tf32_f32", "float32", "default", 1),
        ("dot_f32_f32_f32", "float32", "highest", 1),
    ],
)
def test_an_algorithm_says_what_is_multiplied(
    algorithm: str, dtype: str, precision: str, factor: int
) -> None:
    text = entry(
        "%a = f32[8,4]{1,0} parameter(0)",
        "ROOT %y = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
        f"algorithm={algorithm}",
    )
    (product,) = products_of(*only(text, "dot"))
    assert product == (dtype, precision, factor * 2.0 * 8 * 8 * 4)


def test_the_wider_operand_says_the_dtype() -> None:
    text = entry(
        "%a = f8e5m2[8,4]{1,0} parameter(0)",
        "%b = bf16[8,4]{1,0} parameter(1)",
        "ROOT %y = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    )
    assert hlo_product_flops(text) == {"bfloat16": 2.0 * 8 * 8 * 4}


def test_cycles_count_with_the_turns_of_loops() -> None:
    counted = LOOP.replace(
        "calls=%sliced", 'calls=%sliced, backend_config={"estimated_cycles":"7"}'
    )
    never = f'"estimated_cycles":"{2**62}"'
    counted = counted.replace("calls=%updated", f"calls=%updated, backend_config={{{never}}}")
    assert estimated_cycles(counted) == (7, 35)


def test_products_of_a_compiled_program() -> None:
    """Products count as often as they run, and convolutions without what is padded."""

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        y, _ = jax.lax.scan(
            lambda x, w: (
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout),
                None,
            ),
            x,
            jnp.stack([kernel] * 3),
        )
        return jnp.einsum("bhwc,cd->bhwd", y, kernel[0, 0])

    x, kernel = jnp.ones((2, 5, 5, 4)), jnp.ones((3, 3, 4, 4))
    text = str(jax.jit(convolved).lower(x, kernel).compile().as_text())
    each = 2 * 2 * 4 * 4  # two images, one place
    assert hlo_product_flops(text) == {"float32": each * (3 * 13**2 + 5**2)}


def test_a_product_that_cannot_be_read_is_an_error() -> None:
    text = entry("%a = f32[8,4]{1,0} parameter(0)", "ROOT %y = f32[8,8]{1,0} dot(%a, %a)")
    with pytest.raises(ValueError, match="no product that can be read: y"):
        hlo_product_flops(text)


def test_a_gather_reads_the_rows_that_it_takes() -> None:
    text = entry(
        "%table = f32[1000,16]{1,0} parameter(0)",
        "%ids = s32[8,1]{1,0} parameter(1)",
        "ROOT %rows = f32[8,16]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,16}",
    )
    module, gather = only(text, "gather")
    assert Traffic(module).bytes(gather) == pytest.approx(4 * (2 * 8 * 16 + 8))
