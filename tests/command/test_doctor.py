"""What `jaxmp doctor` says follows from facts: devices, settings, sizes of products."""

import json
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmp._tools.command.doctor import DoctorReport
from jaxmp._tools.command.machine import Machine, remarks, settings, this_machine, versions
from jaxmp._tools.command.main import main
from jaxmp._tools.command.program import NamedProgram
from jaxmp._tools.command.shapes import ProductShape, paddings, parse_shapes, shapes_in
from jaxmp._tools.planning.devices import DEVICES


def machine(kind: str, capability: str = "", wrong: bool = False) -> Machine:
    platform = "cpu" if kind == "cpu" else "tpu" if "TPU" in kind else "gpu"
    return Machine(platform, kind, 1, 1, 2**30, capability, "runtime", wrong)


def report(at: Machine, shapes: tuple[str, ...] = ()) -> DoctorReport:
    return DoctorReport(at, "", None, {"jax": "1"}, {}, parse_shapes(shapes))


@pytest.mark.parametrize(
    ("kind", "capability", "policy", "codes"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0", "mixed_bfloat16", "float8"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "mixed_bfloat16", "int8"),
        ("Tesla V100-SXM2-16GB", "7.0", "mixed_float16", ""),
        ("TPU v5 lite", "", "mixed_bfloat16", "int8"),
        ("TPU7x", "", "mixed_bfloat16", "float8"),
        # Not in the table: the compute capability says it.
        ("NVIDIA GeForce RTX 3090", "8.6", "mixed_bfloat16", "int8"),
        ("NVIDIA GeForce RTX 2080 Ti", "7.5", "mixed_float16", "int8"),
        ("NVIDIA RTX PRO 6000 Blackwell", "12.0", "mixed_bfloat16", "float8"),
        ("NVIDIA Tesla P100", "6.0", "float32", ""),
        # Nothing is known.
        ("cpu", "", "float32", ""),
        ("AMD Instinct MI999", "gfx999", "float32", None),
    ],
)
def test_the_format_follows_from_what_the_device_multiplies(
    kind: str, capability: str, policy: str, codes: str | None
) -> None:
    found = report(machine(kind, capability=capability))
    assert found.choice.policy == policy
    assert found.codes.partition("_")[0] == (codes or "")
    text = str(found)
    assert f"Train in {policy}:" in text
    wanted = {
        "float8": "multiplies float8: mixed_float8",
        "int8": "multiplies int8, and widens float8: `,products=int8` behind the policy above",
        "": "does not multiply 8 bits",
        None: "not known",
    }
    assert wanted[codes] in " ".join(text.partition("\n8 bits:")[2].split())


def test_what_is_left_out_of_8_bits_is_said() -> None:
    sizes = ("16384x8192x8192", "16384x1024x1024", "16384x8192x50257")
    found = report(machine("NVIDIA H100 80GB HBM3"), sizes)
    wanted = ["", "K = 1024, N = 1024 is slower in 8 bits", "N = 50257 is no multiple of 16"]
    assert found.as_dict()["left_out_of_8_bits"] == wanted
    assert "is slower in 8 bits" in " ".join(str(found).split())
    heads = ProductShape(4096, 64, 4096, batch=32)
    assert "attention" in found.left_out_of_8_bits(heads)
    assert report(machine("Tesla V100-SXM2-16GB")).left_out_of_8_bits(heads) == ""


def test_sizes_that_are_padded_are_found() -> None:
    shapes = parse_shapes(["4096x1024x50257", "63x1000x1024", "64x1024x512"])
    found = [(p.name, p.size, p.padded) for p in paddings(shapes, DEVICES["a100"])]
    assert found == [("N", 50257, 50264)]
    found = [(p.name, p.multiple, p.padded) for p in paddings(shapes, DEVICES["h100"])]
    assert found == [("N", 8, 50264), ("N", 16, 50272), ("K", 16, 1008)]
    found = [(p.name, p.padded) for p in paddings(shapes, DEVICES["v5e"])]
    assert found == [("N", 50304), ("K", 1024)]
    assert {p.multiple for p in paddings(shapes, None)} == {8, 16, 128}
    assert paddings(parse_shapes(["64x1x7", "1x999x7"]), DEVICES["h100"]) == []


def test_padding_is_said_in_numbers() -> None:
    text = str(report(machine("NVIDIA H100 80GB HBM3"), ("4096x1024x50257", "64x256x10")))
    assert "N: 50257 -> 50264 for bfloat16, +0.01 %" in text
    assert "N: 10 -> 16 for bfloat16, +60 %" in text
    assert "Pad N with columns of zeros" in text
    assert "All sizes are multiples" in str(report(machine("TPU v5e"), ("128x128x128",)))


def test_a_program_has_its_shapes_by_line() -> None:
    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, weights)
        return jnp.einsum("bqd,bkd->bqk", x, x).sum()

    weights, x = jax.ShapeDtypeStruct((5, 8, 8), "float32"), jnp.zeros((2, 4, 8))
    found = shapes_in(NamedProgram("it", jax.grad(loss), (weights, x), {}))
    sizes = [(each.rows, each.summed, each.columns, each.runs, each.batch) for each in found]
    assert sizes == [(8, 8, 8, 5, 1), (4, 8, 4, 1, 2)]
    assert all(re.match(r"test_doctor\.py:\d+ ", each.line) for each in found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"jax_enable_x64": "True"}, "jax_enable_x64 is on"),
        ({"jax_numpy_dtype_promotion": "strict"}, "promotion is strict"),
        ({"jax_default_matmul_precision": "highest"}, "products of float32 operands"),
        ({"jax_debug_nans": "True"}, "a loss scale expects overflows"),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "cuBLAS multiplies float32 exactly"),
        ({"XLA_FLAGS": "--a=b --xla_gpu_autotune_level=0"}, "kernels are not tried out"),
    ],
)
def test_settings_that_change_dtypes_are_remarked_on(found: dict[str, str], said: str) -> None:
    (only,) = remarks(found, machine("NVIDIA H100"))
    assert said in only


def test_usual_settings_need_no_remark() -> None:
    usual = {"jax_enable_x64": "False", "jax_numpy_dtype_promotion": "standard"}
    assert remarks(usual, machine("NVIDIA H100")) == []
    assert remarks({}, None) == []


def test_settings_are_read_as_they_are_now() -> None:
    with jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("highest"):
        found = settings({"XLA_FLAGS": "--x", "PATH": "/bin"})
    assert found["jax_numpy_dtype_promotion"] == "strict"
    assert found["jax_default_matmul_precision"] == "highest"
    assert found["XLA_FLAGS"] == "--x"
    assert "PATH" not in found


def test_a_plugin_without_its_device_is_said() -> None:
    (said,) = remarks({}, machine("cpu"), {"jax", "jax-cuda13-plugin"})
    assert said.startswith("jax-cuda13-plugin is installed, and JAX runs on the CPU")
    assert remarks({}, machine("NVIDIA H100"), {"jax-cuda13-plugin"}) == []


def test_a_program_without_products_has_no_shapes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sine.py").write_text("import math\ndef program():\n    return abs, (-1.0,)\n")
    assert main(["doctor", "--shapes", f"{tmp_path}/sine.py:program"]) == 2
    assert "sine.py:program has no products of matrices" in capsys.readouterr().err


def test_a_wrong_compiler_is_said() -> None:
    (said,) = remarks({}, machine("cpu", wrong=True))
    assert "sums bfloat16 wrongly" in said


def test_this_machine_and_its_versions() -> None:
    here = this_machine()
    assert (here.platform, here.devices) == ("cpu", jax.device_count())
    assert versions()["jax"] == jax.__version__


def test_without_a_device_the_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Machine:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr("jaxmp._tools.command.doctor.this_machine", fails)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "JAX has no device: Unable to initialize" in out
    assert "JAX has no device: Unable to initialize" in err


def test_the_command_advises_for_absent_devices(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = 1 if this_machine().sums_wrongly else 0
    assert main(["doctor", "--device", "v100", "--json", "--shapes", "64x64x63"]) == wanted
    found = json.loads(capsys.readouterr().out)
    assert found["choice"]["policy"] == "mixed_float16"
    assert found["paddings"][0]["padded"] == 64
