"""The table of devices: what names and kinds find, and that its rates hang together."""

import pathlib
import types

import jax
import pytest

from jaxmp._tools.planning.absent_devices import gpu_target
from jaxmp._tools.planning.devices import DEVICES, find_device

# What JAX calls devices, as its users print them.
KINDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "7x",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_of_jax_is_found_by_its_kind(kind: str) -> None:
    assert find_device(types.SimpleNamespace(device_kind=kind)).name == KINDS[kind]
    assert find_device(kind).name == KINDS[kind]


@pytest.mark.parametrize("name", DEVICES)
def test_names_and_aliases_find_their_device(name: str) -> None:
    device = DEVICES[name]
    for each in (name, name.upper(), *device.aliases, device):
        assert find_device(each) is device


def test_an_unknown_device_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no data of a device 'h1000x'\. Known are .*h100, .*v5e"):
        find_device("h1000x")
    with pytest.raises(ValueError, match="no data of a device 'cpu'"):
        find_device(jax.devices("cpu")[0])
    with pytest.raises(TypeError, match="got int"):
        find_device(5)


@pytest.mark.parametrize("name", DEVICES)
def test_narrower_operands_are_never_slower(name: str) -> None:
    """A slip in the table, such as a column too far, would break the order of the rates."""
    device = DEVICES[name]
    rates = [
        device.peaks.of("float32", "highest"),
        device.peaks.of("float32"),
        device.peaks.of("float16"),
        device.peaks.of("float8_e4m3fn"),
    ]
    assert rates == sorted(rates)
    assert 1e12 < rates[-1] < 1e16
    assert 10e9 < device.memory < 1e12
    # Every chip of these years needs 50 to 700 operations for a byte to be busy.
    assert 50 < device.peaks.of("float16") / device.bandwidth < 700


def test_what_a_device_does_not_multiply_runs_wider() -> None:
    v100, a100, v5e = (DEVICES[name].peaks for name in ("v100", "a100", "v5e"))
    assert v100.of("bfloat16") == v100.of("float32") == v100.float32
    assert a100.of("float8_e4m3fn") == a100.bfloat16
    assert a100.of("float64") == a100.float32
    assert a100.of("complex64") == a100.tensorfloat32
    assert v5e.of("uint8") == v5e.of("int8")
    assert v5e.of("float8_e5m2") == v5e.bfloat16
    assert v5e.of("int8") == 2 * v5e.bfloat16


def test_three_passes_of_a_tpu_take_three_times_as_long() -> None:
    v5e, h100 = DEVICES["v5e"].peaks, DEVICES["h100"].peaks
    assert v5e.of("float32", "high") == pytest.approx(v5e.bfloat16 / 3)
    assert h100.of("float32", "high") == h100.tensorfloat32  # a GPU has no such passes


def test_the_table_of_formats_says_what_devices_multiply() -> None:
    """The page for users, by the rates of the data sheets."""
    page = (pathlib.Path(__file__).parents[2] / "docs/faq.md").read_text()
    table = page.partition("| device |")[2].partition("\n\n")[0]
    found = {}
    for row in table.splitlines()[2:]:
        names, policies, codes = row.strip("| ").split(" | ")
        for name in names.removeprefix("TPU ").split(", "):
            found[name.lower()] = (policies.partition('"')[2].partition('"')[0], codes)
    found["b200"] = (found["h200"][0], found["b200"][1])  # "the same"
    for name in DEVICES.keys() & found.keys():
        peaks, (policy, codes) = DEVICES[name].peaks, found[name]
        assert policy == ("mixed_bfloat16" if peaks.bfloat16 else "mixed_float16"), name
        assert ("float8" in codes, "int8" in codes) == (peaks.float8 > 0, peaks.int8 > 0), name
    assert len(DEVICES.keys() & found.keys()) == 17


@pytest.mark.parametrize(("name", "optin"), [("t4", 65536), ("a100", 166912), ("b200", 232448)])
def test_a_block_gets_less_shared_memory_from_capability_8_on(name: str, optin: int) -> None:
    """Compared as text, 10 would be less than 8, and a kernel of a B200 would not fit."""
    assert f"shared_memory_per_block_optin: {optin}" in gpu_target(name)
