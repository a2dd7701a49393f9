"""Reading what TPU slices send to each other: the lines are those that libtpu 0.0.42 writes."""

from typing import Any

import pytest

from tests.support import hlo_texts

pytestmark = pytest.mark.jax

ALL = '"{1,2,3}x{0:1}"'  # three slices of two devices
PAIRS = "{{100000,300000},{100001,300001}}"
MOVES = "{{100001->200000},{200001->300000}}"


def line(shape: str, kind: str, target: str = ALL, operation: str = "", sent: str = "%p") -> str:
    """A pair of send and recv between slices."""
    reduces = f',_xla_megascale_reduce_operation="{operation}"' if operation else ""
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="psum.7_0"{reduces},'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    both = [
        f"%send = ({shape}, u32[], token[]) send({sent}, %t), channel_id=2, {attributes}",
        f"%recv = ({shape}, u32[], token[]) recv(%t), channel_id=1, {attributes}",
        "%send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true",
    ]
    return "\n  ".join(both)


def program(*lines: str) -> Any:
    """Of two devices in each slice."""
    return hlo_texts.program("%p = bf16[8] parameter(0)", *lines, devices=2)


@pytest.mark.parametrize(
    ("kind", "target", "operation", "want", "groups"),
    [
        ("ALL_REDUCE", ALL, "SUM", ("all-reduce", "add", 16), ((0, 2, 4), (1, 3, 5))),
        ("ALL_REDUCE", ALL, "MAX", ("all-reduce", "max", 16), ((0, 2, 4), (1, 3, 5))),
        ("ALL_REDUCE", ALL, "PRODUCT", ("all-reduce", "mul", 16), ((0, 2, 4), (1, 3, 5))),
        ("ALL_REDUCE", ALL, "OTHER", ("all-reduce", "mixed", 16), ((0, 2, 4), (1, 3, 5))),
        ("ALL_REDUCE", PAIRS, "SUM", ("all-reduce", "add", 16), ((0, 4), (1, 5))),
        ("REDUCE_SCATTER", ALL, "SUM", ("reduce-scatter", "add", 16), ((0, 2, 4), (1, 3, 5))),
        ("ALL_GATHER", ALL, "", ("all-gather", "", 48), ((0, 2, 4), (1, 3, 5))),
        ("ALL_TO_ALL", PAIRS, "", ("all-to-all", "", 16), ((0, 4), (1, 5))),
        ("ONE_TO_ONE", MOVES, "", ("collective-permute", "", 16), ((1, 2), (3, 4))),
    ],
)
def test_kinds(kind: str, target: str, operation: str, want: Any, groups: Any) -> None:
    """Every kind is read once, with its dtype, its reducer, whole arrays and its devices."""
    (got,) = program(line("bf16[8]{0:T(8,128)(2,1)}", kind, target, operation)).transfers
    assert (got.kind, got.reducer, got.bytes) == want
    assert (got.dtype, got.arrays, got.groups) == ("bfloat16", 1, groups)
    assert got.between_slices


def test_the_header_counts_the_devices_of_one_slice() -> None:
    read = program(line("bf16[8]", "ALL_REDUCE", operation="SUM"))
    assert (read.devices, read.slices, read.sends) == (2, 3, 0)
    assert program().slices == 1


def test_slices_are_counted_from_the_first_one() -> None:
    """A permute among the later slices does not make them the first ones; from zero is read too."""
    later = program(line("bf16[8]", "ONE_TO_ONE", "{{200000->300001}}"))
    assert (later.slices, later.transfers[0].groups) == (3, ((2, 5),))
    from_zero = program(line("bf16[8]", "ALL_REDUCE", '"{0,1}x{0:1}"', "SUM"))
    assert (from_zero.slices, from_zero.transfers[0].groups) == (2, ((0, 2), (1, 3)))


def test_other_host_transfers_are_no_collectives() -> None:
    """A callback sends to the host as well, and to no other device."""
    callback = line("bf16[8]", "ALL_REDUCE", operation="SUM").replace("megascale_runtime", "host")
    read = program(callback)
    assert (read.transfers, read.slices, read.sends) == ((), 1, 0)


def test_new_ways_of_writing_are_an_error() -> None:
    """What crosses slices is never left out without a word."""
    with pytest.raises(ValueError, match="unknown kind of collective between slices: 'BROADCAST'"):
        program(line("bf16[8]", "BROADCAST"))
    with pytest.raises(ValueError, match="unknown way of writing the slices"):
        program(line("bf16[8]", "ALL_REDUCE", '"every slice"', "SUM"))


SUM = "replica_groups={{0,1}}, to_apply=%add"


@pytest.mark.parametrize(
    ("mask", "want"),
    [("%slice", "add"), ("%device", "select")],
)
def test_a_sum_of_what_one_device_has_rounds_nothing(mask: str, want: str) -> None:
    """Of all devices one contributes, and not one in each slice: both sums only move numbers."""
    read = program(
        '%slice = u32[] custom-call(), custom_call_target="SliceId"',
        "%place = u32[] partition-id()",
        "%two = u32[] constant(2)",
        "%before = u32[] multiply(%slice, %two)",
        "%device = u32[] add(%before, %place)",
        "%one = u32[] constant(1)",
        f"%mask = pred[] compare({mask}, %one), direction=EQ",
        "%zero = bf16[] constant(0)",
        "%zeros = bf16[8] broadcast(%zero), dimensions={}",
        "%picked = bf16[8] select(%mask, %p, %zeros)",
        f"%inside = bf16[8] all-reduce(%picked), {SUM}",
        line("bf16[8]", "ALL_REDUCE", operation="SUM", sent="%inside"),
    )
    inside, between = read.transfers
    assert (inside.reducer, between.reducer) == (want, want)
