"""Reading the text of compiled programs: real ones, cut down, and each way of writing things."""

import pathlib
import re
from typing import Any

import pytest

from jaxmp._tools.hlo.collectives import Transfer, read_program
from jaxmp._tools.hlo.parser import Array, arrays_in, read_shape
from jaxmp._tools.hlo.replica_groups import read_groups
from tests.support.hlo_texts import ADD, only, program

pytestmark = pytest.mark.jax

HLO = pathlib.Path(__file__).parents[1] / "hlo" / "programs"


def read(name: str) -> tuple[Transfer, ...]:
    return read_program((HLO / f"{name}.txt").read_text()).transfers


def totals(transfers: tuple[Transfer, ...]) -> dict[tuple[str, str, str, int], int]:
    """Bytes in all runs, by kind, reducer, dtype and size of the groups."""
    found: dict[Any, int] = {}
    for each in transfers:
        key = (each.kind, each.reducer, each.dtype, len(each.groups[0]))
        found[key] = found.get(key, 0) + each.bytes * each.runs
    return found


# Five layers of 256 x 256 in a scan, and a head of 256 x 512; a batch of 8 for each device.
LAYER, HEAD = 256 * 256 * 2, 256 * 512 * 2
EVERY_KIND = {
    ("all-reduce", "add", "float32", 4): 128 * 512 * 4,
    ("all-reduce", "max", "float32", 2): 128 * 512 * 4,
    ("reduce-scatter", "add", "float32", 2): 128 * 512 * 4,
    ("all-gather", "", "bfloat16", 4): 4 * 128 * 512 * 2,
    ("all-to-all", "", "float32", 2): 128 * 512 * 4,
    ("collective-permute", "", "float32", 2): 128 * 512 * 4,
    ("all-reduce", "add", "int32", 4): 128 * 4,
    ("all-reduce", "add", "int32", 8): 4,
}
FULLY_SHARDED_TENSOR_PARALLEL = {
    # Half of each layer forward and backward. Of the head a device gathers all, and it does so
    # twice: without constraints the partitioner likes that best.
    ("all-gather", "", "bfloat16", 4): 2 * 5 * LAYER // 2 + HEAD,
    ("all-gather", "", "bfloat16", 2): (2 * 5 + 1) * 16 * 256 * 2,
    ("all-reduce", "add", "bfloat16", 4): (5 * LAYER + HEAD) // 2,
    ("reduce-scatter", "add", "bfloat16", 2): (5 + 1) * 16 * 256 * 2,
    ("all-reduce", "add", "float32", 8): 4,
}
EXPECTED = {
    "tpu_own_slices": {
        ("all-gather", "", "bfloat16", 128): 5 * LAYER + HEAD,
        ("all-reduce", "add", "bfloat16", 128): 5 * LAYER + HEAD,
        ("all-reduce", "add", "float32", 128): 4,
    },
    "tpu_reduce_scatter": {
        ("all-gather", "", "bfloat16", 8): 5 * LAYER + HEAD,
        ("reduce-scatter", "add", "bfloat16", 8): 5 * LAYER + HEAD,
        ("all-reduce", "add", "float32", 8): 4,
    },
    "tpu_async_fusion": {
        ("all-gather", "", "bfloat16", 2): 2 * 5 * 16 * 256 * 2,
        ("all-reduce", "add", "bfloat16", 2): (5 * 256 + 512) * 16 * 2,
        ("all-reduce", "add", "bfloat16", 4): (5 * LAYER + HEAD) // 2,
        ("all-reduce", "add", "float32", 4): 4,
    },
    "gpu_starts": FULLY_SHARDED_TENSOR_PARALLEL,
    "gpu_newer_starts": FULLY_SHARDED_TENSOR_PARALLEL,
    "gpu_every_kind": EVERY_KIND,
    "tpu_every_kind": EVERY_KIND,
    "gpu_split_table": {
        ("all-gather", "", "int32", 8): 64 * 64 * 4,
        ("reduce-scatter", "select", "bfloat16", 8): 64 * 64 * 512 * 2,
        ("all-reduce", "add", "bfloat16", 8): 8 * 2048 * 512 * 2,
        ("all-reduce", "add", "float32", 8): 4,
    },
    # A layer of 32 x 64, five of 64 x 64 and one of 64 x 32; four examples for each device.
    "cpu_partitioned": {
        ("all-gather", "", "bfloat16", 2): 2 * 5 * 4 * 64 * 2,
        ("all-reduce", "add", "bfloat16", 2): 5 * 4 * 64 * 2 + 4 * 32 * 2,
        ("all-reduce", "add", "bfloat16", 4): (5 * 64 * 64 + 2 * 32 * 64) // 2 * 2,
        ("all-reduce", "add", "float32", 4): 4,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_compiled_programs(name: str) -> None:
    program = read_program((HLO / f"{name}.txt").read_text())
    assert totals(program.transfers) == EXPECTED[name]
    assert (program.unknown_loops, program.conditionals, program.sends) == (0, 0, 0)


def test_every_program_is_tested() -> None:
    assert sorted(path.stem for path in HLO.glob("*.txt")) == sorted(EXPECTED)


@pytest.mark.parametrize(
    ("name", "without", "instead"),
    [
        ("tpu_async_fusion", '"async_collective_fusion_config"', '"other"'),
        ("tpu_reduce_scatter", "all-reduce-scatter", "fused"),
        ("tpu_own_slices", " partition-id(", " iota("),
        ("gpu_split_table", "/gather", "/dot_general"),
        ("cpu_partitioned", "direction=LT", "direction=NE"),
        ("gpu_starts", "known_trip_count", "trip_count"),
        ("gpu_newer_starts", "((", "("),
    ],
)
def test_what_the_compilers_write_counts(name: str, without: str, instead: str) -> None:
    """Positive controls: each fixture is read wrongly without what it is there for."""
    text = (HLO / f"{name}.txt").read_text()
    assert without in text
    changed = text.replace(without, instead).replace(" replica-id(", " iota(")
    assert totals(read_program(changed).transfers) != EXPECTED[name]


GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
ARS = f"{GROUPS}, to_apply=%add"


@pytest.mark.parametrize(
    ("line", "want"),
    [
        (f"f32[8,4]{{1,0}} all-reduce(%p), {ARS}", ("all-reduce", 32)),
        (f"f32[8,4] all-reduce-start(%p), {ARS}", ("all-reduce", 32)),
        (f"(f32[8], f32[3]) all-reduce-start(%p, %q), {ARS}", ("all-reduce", 11)),
        (
            f"((f32[8,4]), f32[8,4]) all-reduce-start(%p), {ARS}",
            ("all-reduce", 32),
        ),
        (
            f"((f32[8], f32[3]), (f32[8], f32[3])) all-reduce-start(%p, %q), {ARS}",
            ("all-reduce", 11),
        ),
        (f"f32[2,4] reduce-scatter(%p), {ARS}", ("reduce-scatter", 32)),
        (f"((f32[8,4]), f32[2,4]) reduce-scatter-start(%p), {GROUPS}", ("reduce-scatter", 32)),
        (
            f"((f32[8], f32[12]), (f32[2], f32[3])) reduce-scatter-start(%p, %q), {GROUPS}",
            ("reduce-scatter", 20),
        ),
        (f"f32[8,4] all-gather(%p), {GROUPS}, dimensions={{0}}", ("all-gather", 32)),
        (f"(f32[2,4], f32[8,4]) all-gather-start(%p), {GROUPS}", ("all-gather", 32)),
        (f"((f32[2,4]), f32[8,4]) all-gather-start(%p), {GROUPS}", ("all-gather", 32)),
        (
            f"((f32[2], f32[1]), (f32[8], f32[4])) all-gather-start(%p, %q), {GROUPS}",
            ("all-gather", 12),
        ),
        (
            f"(f32[2], f32[2], f32[2], f32[2]) all-to-all(%p, %p, %p, %p), {GROUPS}",
            ("all-to-all", 8),
        ),
        (f"((f32[8]), f32[8]) all-to-all-start(%p), {GROUPS}", ("all-to-all", 8)),
        (f"f32[8] ragged-all-to-all(%p, %q, %r), {GROUPS}", ("all-to-all", 8)),
        (
            "(f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", 8),
        ),
        (f"f32[8] collective-broadcast(%p), {GROUPS}", ("collective-broadcast", 8)),
    ],
)
def test_kinds_and_sizes(line: str, want: tuple[str, int]) -> None:
    """The whole array, in every way of writing the same thing, and once."""
    kind = line.split("(%")[0].split(" ")[-1].removesuffix("-start")
    got = only(
        "%p = f32[8] parameter(0)",
        f"%start = {line}",
        f"%done = f32[8] {kind.removeprefix('ragged-')}-done(%start)",
    )
    assert (got.kind, got.elements, got.bytes) == (*want, 4 * want[1])


def test_comments_and_layouts() -> None:
    shape = "(" + ", ".join(
        f"/*index={i}*/" * (i == 5) + "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}" for i in range(6)
    )
    operands = ", ".join(f"%p.{i}" for i in range(6)).replace("%p.5", "/*index=5*/%p.5")
    got = only(f"%r = {shape}) all-reduce({operands}), replica_groups={{}}, to_apply=%add")
    assert (got.arrays, got.elements, got.bytes) == (6, 6 * 1024, 6 * 2048)
    assert got.groups == (tuple(range(8)),)


def test_combined_dtypes_are_told_apart() -> None:
    line = f"%r = (f32[4], bf16[8], f32[]) all-reduce(%a, %b, %c), {GROUPS}, to_apply=%add"
    got = [(t.dtype, t.arrays, t.elements, t.bytes) for t in program(line).transfers]
    assert got == [("float32", 2, 5, 20), ("bfloat16", 1, 8, 16)]


def test_wrapped_asynchronous_calls_count_once() -> None:
    wrapped = f"""
%wrapped (p: f32[8]) -> f32[2] {{
  %p = f32[8] parameter(0)
  ROOT %rs = f32[2] reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add
}}
"""
    got = only(
        "%p = f32[8] parameter(0)",
        "%start = ((f32[8]), f32[2], u32[]) async-start(%p), calls=%wrapped",
        "%update = ((f32[8]), f32[2], u32[]) async-update(%start), calls=%wrapped",
        "ROOT %done = f32[2] async-done(%update), calls=%wrapped",
        before=ADD + wrapped,
    )
    assert (got.kind, got.reducer, got.elements, got.runs) == ("reduce-scatter", "add", 8, 1)


@pytest.mark.parametrize(
    ("inside", "want"),
    [
        ("f32[] add(%x, %y)", "add"),
        ("f32[] maximum(%x, %y)", "max"),
        ("f32[] minimum(%x, %y)", "min"),
        ("f32[] multiply(%x, %y)", "mul"),
        ("pred[] and(%x, %y)", "and"),
        ("pred[] or(%x, %y)", "or"),
        ("u32[] xor(%x, %y)", "xor"),
        # As promotion writes it, and as the compiler for TPUs reduces bits.
        ("bf16[] convert(%c)\n  %c = f32[] add(%a, %b)\n  %a = f32[] convert(%x)", "add"),
        ("u32[] or(%a, %x)\n  %a = u32[] and(%x, %y)", "mixed"),
    ],
)
def test_reducers(inside: str, want: str) -> None:
    reducer = ADD.replace("f32[] add(%x, %y)", inside)
    line = f"%r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%add"
    assert only(line, before=reducer).reducer == want


def test_a_reducer_that_is_not_there_is_mixed() -> None:
    assert only(f"%r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%gone").reducer == "mixed"


# --- loops ---------------------------------------------------------------------------------------


def loop(
    start: str = "constant(0)",
    step: str = "constant(1)",
    limit: str = "constant(7)",
    direction: str = "LT",
    counter: str = "%i",
    config: str = "",
    body: str = f"%r = f32[8] all-reduce(%gte, ), {GROUPS}, to_apply=%add",
) -> Any:
    before = f"""
%body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %p = (s32[], f32[8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] {step}
  %next = s32[] add({counter}, %one)
  {body}
  ROOT %out = (s32[], f32[8], s32[]) tuple(%next, %r, %p#2)
}}

%condition (p: (s32[], f32[8], s32[])) -> pred[] {{
  %p = (s32[], f32[8], s32[]) parameter(0)
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%p#0, %limit), direction={direction}
}}
"""
    return program(
        f"%start = s32[] {start}",
        "%copied = s32[] copy(%start)",
        "%seven = s32[] constant(7)",
        "%x = f32[8] parameter(0)",
        "%state = (s32[], f32[8], s32[]) tuple(%copied, %x, %seven)",
        f"%loop = (s32[], f32[8], s32[]) while(%state), condition=%condition, body=%body{config}",
        before=ADD + before,
    )


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        ({}, 7),
        ({"start": "constant(2)"}, 5),
        ({"step": "constant(2)"}, 4),
        ({"limit": "constant(0)"}, 0),
        ({"limit": "get-tuple-element(%p), index=2"}, 7),  # what the loop never changes
        ({"config": ', backend_config={"known_trip_count":{"n":"3"}}'}, 3),
    ],
)
def test_loops_of_known_length(changed: dict[str, str], want: int) -> None:
    read = loop(**changed)
    assert [t.runs for t in read.transfers] == [want]
    assert read.unknown_loops == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"start": "parameter(1)"},
        {"step": "get-tuple-element(%p), index=0"},
        {"limit": "get-tuple-element(%p), index=0"},
        {"direction": "GT"},
        {"step": "constant(-1)"},
        {"step": "constant({1, 2})"},
        {"counter": "%p#2"},
    ],
)
def test_loops_of_unknown_length_count_once(changed: dict[str, str]) -> None:
    read = loop(**changed)
    assert [t.runs for t in read.transfers] == [1]
    assert read.unknown_loops == 1


def test_loops_without_collectives_do_not_matter() -> None:
    assert loop(start="parameter(1)", body="%r = f32[8] negate(%p#1)").unknown_loops == 0


def test_runs_multiply_and_add_up() -> None:
    """A loop in a loop, and a computation that two places call."""
    config = ', backend_config={"known_trip_count":{"n":"3"}}'
    shared = f"""
%shared (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%add
}}

%inner (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] call(%p), to_apply=%shared
}}

%always (p: f32[8]) -> pred[] {{
  %p = f32[8] parameter(0)
  ROOT %true = pred[] constant(true)
}}

%outer (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %loop = f32[8] while(%p), condition=%always, body=%inner{config}
}}
"""
    got = only(
        "%p = f32[8] parameter(0)",
        f"%a = f32[8] while(%p), condition=%always, body=%outer{config}",
        "ROOT %b = f32[8] fusion(%a), kind=kLoop, calls=%shared",
        before=ADD + shared,
    )
    assert got.runs == 10


def test_conditionals_count_every_branch() -> None:
    branches = "".join(
        f"""
%{name} (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%add
}}
"""
        for name in ("yes", "no")
    )
    read = program(
        "%p = f32[8] parameter(0)",
        "%a = f32[8] conditional(%c, %p, %p), branch_computations={%yes, %no}",
        before=ADD + branches,
    )
    assert [t.runs for t in read.transfers] == [1, 1]
    assert read.conditionals == 1


def test_sends_are_counted_but_those_to_the_host() -> None:
    read = program(
        "%a = (f32[8], u32[], token[]) send(%p, %t), channel_id=1",
        "%b = (f32[8], u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true",
    )
    assert read.sends == 1


# --- sums that round nothing ---------------------------------------------------------------------

OWN = (
    "%x = bf16[2] parameter(0)",
    "%zero = bf16[] constant(0)",
    "%zeros = bf16[16] broadcast(%zero), dimensions={}",
    "%device = u32[] partition-id()",
    "%two = u32[] constant(2)",
    "%index = u32[] multiply(%device, %two)",
    "%put = bf16[16] dynamic-update-slice(%zeros, %x, %index)",
    "%r = bf16[16] all-reduce(%put), replica_groups={}, to_apply=%add",
)


def test_own_slices_put_into_zeros_are_a_gather() -> None:
    got = only(*OWN)
    assert (got.kind, got.reducer, got.elements) == ("all-gather", "", 16)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        # The gradient of a slice, the same on every device; and what is not put into zeros.
        ("%device = u32[] partition-id()", "%device = u32[] parameter(1)"),
        ("%zero = bf16[] constant(0)", "%zero = bf16[] constant(1)"),
        ("%zeros = bf16[16] broadcast(%zero), dimensions={}", "%zeros = bf16[16] parameter(1)"),
    ],
)
def test_other_slices_are_sums(line: str, instead: str) -> None:
    assert line in OWN
    got = only(*[instead if each == line else each for each in OWN])
    assert (got.kind, got.reducer) == ("all-reduce", "add")


@pytest.mark.parametrize(
    ("offset", "groups", "want"),
    [
        # On a mesh of 4 x 2, each device has the place of its second coordinate: over that, slices
        # are gathered; over the first, they are the gradients of one slice, and summed.
        ("remainder(%device, %two)", "{{0,1},{2,3},{4,5},{6,7}}", "all-gather"),
        ("remainder(%device, %two)", "{{0,2,4,6},{1,3,5,7}}", "all-reduce"),
        ("remainder(%device, %two)", "{}", "all-reduce"),
        ("divide(%device, %two)", "{{0,1},{2,3},{4,5},{6,7}}", "all-reduce"),
        ("divide(%device, %two)", "{{0,2,4,6},{1,3,5,7}}", "all-gather"),
        ("shift-right-logical(%device, %one)", "{{0,2,4,6},{1,3,5,7}}", "all-gather"),
        ("and(%device, %one)", "{{0,1},{2,3},{4,5},{6,7}}", "all-gather"),
        # As the partitioner keeps coordinates.
        ("bitcast(%looked_up)", "{{0,1},{2,3},{4,5},{6,7}}", "all-gather"),
        ("bitcast(%looked_up)", "{{0,2,4,6},{1,3,5,7}}", "all-reduce"),
        ("bitcast(%uneven)", "{{0,1},{2,3},{4,5},{6,7}}", "all-reduce"),
        # The last two devices share a place; and one that data decides about.
        ("minimum(%device, %six)", "{}", "all-reduce"),
        ("clamp(%two, %device, %six)", "{}", "all-reduce"),
        ("select(%is_six, %six, %device)", "{}", "all-gather"),
        ("add(%device, %data)", "{}", "all-reduce"),
        ("negate(%device)", "{}", "all-reduce"),
    ],
)
def test_slices_of_the_same_place_are_sums(offset: str, groups: str, want: str) -> None:
    got = only(
        *OWN[:5],
        "%one = u32[] constant(1)",
        "%six = u32[] constant(6)",
        "%is_six = pred[] compare(%device, %six), direction=EQ",
        "%data = u32[] parameter(1)",
        "%table = u32[8]{0} constant({0, 1, 0, 1, 0, 1, 0, 1})",
        "%looked_up = u32[1] dynamic-slice(%table, %device), dynamic_slice_sizes={1}",
        "%uneven_table = u32[8]{0} constant({0, 1, 0, 1, 0, 0, 0, 1})",
        "%uneven = u32[1] dynamic-slice(%uneven_table, %device), dynamic_slice_sizes={1}",
        f"%index = u32[] {offset}",
        *OWN[6:7],
        f"%r = bf16[16] all-reduce(%put), replica_groups={groups}, to_apply=%add",
    )
    assert got.kind == want


def test_a_gather_combined_with_a_sum_is_told_apart() -> None:
    last = "%r = (bf16[16], bf16[8]) all-reduce(%put, %g), replica_groups={}, to_apply=%add"
    read = program(*OWN[:-1], "%g = bf16[8] parameter(1)", last)
    got = [(t.kind, t.reducer, t.elements) for t in read.transfers]
    assert got == [("all-gather", "", 16), ("all-reduce", "add", 8)]


PICK = (
    "%x = bf16[8] parameter(0)",
    "%zero = bf16[] constant(0)",
    "%zeros = bf16[8] broadcast(%zero), dimensions={}",
    "%device = u32[] partition-id()",
    "%three = u32[] constant(3)",
    "%is_mine = pred[] compare(%device, %three), direction=EQ",
    "%mask = pred[8] broadcast(%is_mine), dimensions={}",
    "%put = bf16[8] select(%mask, %x, %zeros)",
    "%r = bf16[8] all-reduce(%put), replica_groups={}, to_apply=%add",
)


SWAPPED = "%put = bf16[8] select(%mask, %zeros, %x)"


@pytest.mark.parametrize(
    ("direction", "put", "want"),
    [("EQ", PICK[7], "select"), ("NE", SWAPPED, "select"), ("EQ", SWAPPED, "add")],
)
def test_what_one_device_has_is_picked(direction: str, put: str, want: str) -> None:
    condition = PICK[5].replace("EQ", direction)
    assert only(*PICK[:5], condition, PICK[6], put, PICK[8]).reducer == want


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        # Some of the devices, a condition on data, and no zeros.
        (PICK[5], PICK[5].replace("EQ", "LT")),
        (PICK[5], PICK[5].replace("EQ", "NE")),
        (PICK[3], "%device = u32[] parameter(1)"),
        (PICK[1], "%zero = bf16[] constant(1)"),
    ],
)
def test_what_several_devices_may_have_is_summed(line: str, instead: str) -> None:
    assert only(*[instead if each == line else each for each in PICK]).reducer == "add"


def test_a_sum_of_what_was_looked_up_is_a_sum() -> None:
    """Rows of a table that one axis splits, summed over another: different rows are added."""
    put = PICK[7] + ', metadata={op_name="jit(f)/gather"}'
    inner = "%a = bf16[8] all-reduce(%put), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add"
    outer = "%r = bf16[8] all-reduce(%a), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add"
    read = program(*PICK[:7], put, inner, outer)
    assert [each.reducer for each in read.transfers] == ["select", "add"]


@pytest.mark.parametrize(("direction", "want"), [("EQ", "select"), ("GE", "add")])
def test_replicas_have_numbers_of_their_own(direction: str, want: str) -> None:
    lines = [each.replace("partition-id", "replica-id").replace("EQ", direction) for each in PICK]
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule t, replica_count=8\n{ADD}\nENTRY %main () -> () {{\n{body}\n}}\n"
    (found,) = read_program(text).transfers
    assert found.reducer == want


def test_padding_does_not_count() -> None:
    padded = (
        "%x = bf16[7] parameter(0)",
        "%zero = bf16[] constant(0)",
        "%p = bf16[8] pad(%x, %zero), padding=0_1",
        "%r = bf16[8] all-reduce(%p), replica_groups={}, to_apply=%add",
    )
    assert only(*padded).elements == 7


# --- groups --------------------------------------------------------------------------------------

ACROSS = ((0, 2, 4, 6), (1, 3, 5, 7))
APART = ((0, 4), (1, 5), (2, 6), (3, 7))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ACROSS),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", PAIRS),
        ("[2,4]<=[4,2]T(1,0)", ACROSS),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['data'=4,'model'=2] {'data'}", ACROSS),
        ("mesh[data=4,model=2] {model}", PAIRS),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ACROSS),
        ("mesh['a'=4,'b'=2] {'a','b'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=4,'b'=2] {'b','a'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        # The first half of an axis, and the second: 8 as 2 x 4, 4 x 2, and 2 x 2 x 2.
        ("mesh['a'=8] {'a':(1)2}", APART),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ((7, 6), (5, 4), (3, 2), (1, 0))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "mesh['a'=4,'b'=2], device_ids=([8]<=[2,4]T(1,0)) {'b'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
    ],
)
def test_groups(text: str, want: Any) -> None:
    for behind in ("", ", dimensions={0}", ', to_apply=%add, metadata={op_name="f"}'):
        assert read_groups(f", channel_id=1, replica_groups={text}{behind}", 8) == want


def test_groups_that_are_not_written_are_all() -> None:
    assert read_groups(", dimensions={0}", 3) == ((0, 1, 2),)


def test_groups_in_an_unknown_way_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown way of writing replica groups: .*<0\.\.7>"):
        read_groups("replica_groups=<0..7>, to_apply=%add", 8)


# --- shapes and places ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dtype", "elements", "size"),
    [
        ("pred[3]", "bool", 3, 3),
        ("s4[5]", "int4", 5, 3),
        ("u8[]", "uint8", 1, 1),
        ("f8e4m3fn[2,3]{1,0}", "float8_e4m3fn", 6, 6),
        ("f8e5m2[4]", "float8_e5m2", 4, 4),
        ("c64[2]", "complex64", 2, 16),
        ("bf16[<=8,128]{1,0:T(8,128)(2,1)}", "bfloat16", 1024, 2048),
        ("f32[0,4]", "float32", 0, 0),
        ("token[]", "token", 1, 0),
    ],
)
def test_shapes(text: str, dtype: str, elements: int, size: int) -> None:
    shape = read_shape(text)
    assert shape == Array(dtype, elements)
    assert [array.bytes for array in arrays_in(shape)] == [size]


TABLES = """
FileNames
1 "train.py"
2 "flax/linen.py"

FunctionNames
1 "<module>"
2 "loss.<locals>.body"

FileLocations
1 {file_name_id=1 function_name_id=1 line=30 end_line=30 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=12 end_line=12 column=1 end_column=2}

StackFrames
"""


@pytest.mark.parametrize("shift", [0, 1])
def test_source_lines(shift: int) -> None:
    """Compilers write the number of the parent plus one; should one not, that is read, too."""
    frames = f"""1 {{file_location_id=1 parent_frame_id={shift}}}
2 {{file_location_id=2 parent_frame_id={1 + shift}}}
"""
    metadata = "metadata={op_name=\"jit(f)/x[\\'a\\']/dot\" stack_frame_id=2}"
    line = f"%r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%add, {metadata}"
    got = only(line, before=TABLES + frames + ADD)
    assert got.op_name == "jit(f)/x['a']/dot"
    assert [tuple(frame) for frame in got.frames] == [
        ("flax/linen.py", 12, "loss.<locals>.body"),
        ("train.py", 30, "<module>"),
    ]


def test_source_lines_without_tables() -> None:
    metadata = 'metadata={op_name="f" source_file="train.py" source_line=3}'
    got = only(f"%r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%add, {metadata}")
    assert [tuple(frame) for frame in got.frames] == [("train.py", 3, "")]


def test_a_name_is_taken_from_what_is_carried() -> None:
    """A combined collective has no name: the largest array that it carries gives it one."""
    got = only(
        '%a = f32[2] negate(%p), metadata={op_name="small" source_file="a.py" source_line=1}',
        '%b = f32[8] negate(%p), metadata={op_name="large" source_file="b.py" source_line=2}',
        f"%r = (f32[2], f32[8]) all-reduce(%a, %b), {GROUPS}, to_apply=%add",
    )
    assert (got.op_name, got.frames[0].file) == ("large", "b.py")


def test_names_of_users_are_no_structure() -> None:
    metadata = 'metadata={op_name="replica_groups={{0}}, to_apply=%max, body=%shared"}'
    shared = f"""
%shared (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%p), {GROUPS}, to_apply=%add, {metadata}
}}
"""
    got = only(
        "%p = f32[8] parameter(0)",
        "%a = f32[8] fusion(%p), kind=kLoop, calls=%shared",
        f"%b = f32[8] negate(%a), {metadata}",
        before=ADD + shared,
    )
    assert (len(got.groups), got.runs, got.reducer) == (2, 1, "add")


def test_fixtures_have_no_paths_of_a_machine() -> None:
    for path in HLO.glob("*.txt"):
        assert not re.findall(r'"/[^"]*"', path.read_text())
