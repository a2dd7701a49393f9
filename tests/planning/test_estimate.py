"""The roofline of programs counted by hand, its report, and what an estimate refuses."""

import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp._planning.absent_devices import absent_devices, gpu_target
from jaxmp._planning.compile_absent import compile_for
from jaxmp._planning.devices import DEVICES, find_device
from jaxmp._planning.estimate import read_cost
from jaxmp.diagnostics import estimate

# Four turns of a product that computes long, then a sum that moves bytes, and a copy beside it.
TEXT = """\
HloModule made, num_partitions=2

%body (state: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %state = (s32[], bf16[4096,4096]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[4096,4096]{1,0} get-tuple-element(%state), index=1
  %y = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/transpose(jvp(LM))/Block_0/dot_general" source_file="/home/me/net.py" \
source_line=12}, backend_config={"estimated_cycles":"1000"}
  ROOT %next = (s32[], bf16[4096,4096]) tuple(%i, %y)
}

%condition (state: (s32[], bf16[4096,4096])) -> pred[] {
  %state = (s32[], bf16[4096,4096]) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (x: bf16[4096,4096], z: f32[4096,4096]) -> f32[4096,4096] {
  %x = bf16[4096,4096]{1,0} parameter(0)
  %z = f32[4096,4096]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[4096,4096]) tuple(%zero, %x)
  %loop = (s32[], bf16[4096,4096]) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  %copied = (f32[4096,4096]{1,0:S(1)}, f32[4096,4096]{1,0}, u32[]{:S(2)}) copy-start(%z)
  %near = f32[4096,4096]{1,0:S(1)} copy-done(%copied)
  %elsewhere = f32[4096,4096]{1,0:S(1)} custom-call(%near), custom_call_target="my_kernel"
  %summed = f32[4096,4096]{1,0} all-reduce(%elsewhere), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = f32[4096,4096]{1,0} negate(%summed)
}
"""
N = 4096


def test_a_roofline_by_hand() -> None:
    device = DEVICES["v5e"]
    cost = read_cost(TEXT, device)
    product = 2 * N**3 / 197e12 + device.launch
    negation = 8 * N**2 / 819e9 + device.launch
    elsewhere = device.launch  # in near memory
    assert cost.flops == {"bfloat16": 4 * 2 * N**3}
    # Products read two and write one; the copy reads, the sum writes, the negation does both.
    assert cost.bytes == 4 * 3 * 2 * N**2 + 4 * N**2 * (1 + 1 + 2)
    assert cost.seconds == pytest.approx(4 * product + negation + elsewhere)
    assert cost.cycles == 4000
    assert (cost.devices, cost.collectives) == (2, {"all-reduce": 4 * N**2})
    assert cost.bound["compute"] == pytest.approx(4 * product)
    row = cost.rows[0]
    assert (row.name, row.times, row.dtype, row.bound) == ("y", 4, "bfloat16", "compute")
    assert (row.line, row.path, row.direction) == ("net.py:12", "LM/Block_0", "backward")


def test_the_same_program_on_a_faster_device_takes_less() -> None:
    slow, fast = (read_cost(TEXT, DEVICES[name]).seconds for name in ("v5e", "v6e"))
    assert slow / fast == pytest.approx(918 / 197, rel=0.1)


def test_copies_beside_other_work_take_bandwidth() -> None:
    """A program of nothing else takes as long as its bytes do."""
    text = "\n".join(line for line in TEXT.splitlines() if "%copied" in line or "%z = " in line)
    text = f"HloModule made\n\nENTRY %main (z: f32[4096,4096]) -> f32[] {{\n{text}\n}}\n"
    cost = read_cost(text, DEVICES["v5e"])
    assert [row.bound for row in cost.rows] == ["beside"]
    assert cost.seconds == pytest.approx(4 * N**2 / 819e9)


def test_exact_products_are_named_and_slower() -> None:
    exact = TEXT.replace("bf16[", "f32[").replace(
        "rhs_contracting_dims={0}, ",
        "rhs_contracting_dims={0}, operand_precision={highest,highest}, ",
    )
    default = TEXT.replace("bf16[", "f32[")
    costs = [read_cost(text, DEVICES["v5e"]) for text in (default, exact)]
    assert [list(cost.flops) for cost in costs] == [["float32"], ["float32 (exact)"]]
    assert costs[1].bound["compute"] / costs[0].bound["compute"] == pytest.approx(6, rel=0.01)


def test_the_report_says_that_it_is_an_estimate_and_what_it_does_not_see() -> None:
    cost = read_cost(TEXT, DEVICES["v5e"])
    text = str(cost)
    assert "An estimate for v5e, each of 2 devices" in text
    for words in ("0.004 M", "550 GFLOP", "all-reduce", "net.py:12", "LM/Block_0, backward"):
        assert words in text, text
    assert "of my_kernel only the bytes count" in text
    assert "The time of transfers between devices" in text
    assert json.loads(json.dumps(cost.as_dict()))["rows"][0]["line"] == "net.py:12"


def test_unknown_loops_and_memory_that_does_not_fit_are_said() -> None:
    class Planned:
        argument_size_in_bytes = 20 * 2**30
        output_size_in_bytes = 10 * 2**30
        temp_size_in_bytes = 2**30
        alias_size_in_bytes = 10 * 2**30

    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"4"}}', "")
    cost = read_cost(text, DEVICES["v5e"], Planned)
    assert cost.peak_bytes == 21 * 2**30
    assert "131.2% of 16.0 GiB: does not fit" in str(cost)
    assert "How often while loops of unknown length run (1)" in str(cost)
    assert "does not fit" not in str(read_cost(text, DEVICES["v5p"], Planned))  # positive control


def test_an_empty_program_costs_nothing() -> None:
    text = (
        "HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2] parameter(0)\n}\n"
    )
    cost = read_cost(text, find_device("h100"))
    assert (cost.seconds, cost.bytes, cost.flops, cost.rows) == (0.0, 0.0, {}, ())
    assert "An estimate for h100" in str(cost)


def test_what_an_estimate_refuses() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    with pytest.raises(ValueError, match="no data of a device 'h1000'"):
        estimate(double, jnp.ones(2), device="h1000")
    with pytest.raises(ValueError, match=r"no compiler for mi300x comes with jaxmp\[aot\]"):
        estimate(double, jnp.ones(2), device="mi300x")
    with pytest.raises(ValueError, match=r"no compiler for v4 as JAX sees it"):
        estimate(double, jnp.ones(2), device="v4")


def test_without_a_compiler_an_estimate_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    hidden = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else found(name)
    )
    for device in ("v5e", "h100"):
        with pytest.raises(ImportError, match=r"pip install 'jaxmp\[aot\]'"):
            estimate(jnp.sin, jnp.ones(2), device=device)


def test_arguments_on_several_meshes_are_refused() -> None:
    def sharded(*shape: int) -> jax.ShapeDtypeStruct:
        names = ("a", "b")[: len(shape)]
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
        sharding = NamedSharding(mesh, PartitionSpec("a"))
        return jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)

    with pytest.raises(ValueError, match=r"several meshes, \{'a': 8\} and \{'a': 4, 'b': 2\}"):
        compile_for(DEVICES["v5e"], jnp.add, (sharded(8), sharded(4, 2)), {})


def test_more_devices_than_a_slice_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"100000 devices are more than a slice of v5e"):
        absent_devices(DEVICES["v5e"], 100000)


def test_a_target_has_the_numbers_of_its_device() -> None:
    text = gpu_target("h200")
    assert "memory_bandwidth: 4800000000000" in text
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
    assert 'description_str: "NVIDIA H200"' in text
