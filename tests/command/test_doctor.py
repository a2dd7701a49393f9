"""What `jaxmp doctor` says follows from facts: versions, devices, settings."""

import json

import jax
import pytest

from jaxmp._tools.command.doctor import DoctorReport
from jaxmp._tools.command.machine import Machine, remarks, settings, this_machine, versions
from jaxmp._tools.command.main import main


def machine(kind: str, capability: str = "", wrong: bool = False) -> Machine:
    platform = "cpu" if kind == "cpu" else "tpu" if "TPU" in kind else "gpu"
    return Machine(platform, kind, 1, 1, 2**30, capability, "runtime", wrong)


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


def test_the_command_says_what_the_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = 1 if this_machine().sums_wrongly else 0
    with jax.numpy_dtype_promotion("strict"):
        assert main(["doctor", "--json"]) == wanted
        found = json.loads(capsys.readouterr().out)
        assert main(["doctor"]) == wanted
    assert found["machine"]["platform"] == "cpu"
    assert found["versions"]["jax"] == jax.__version__
    assert found["settings"]["jax_numpy_dtype_promotion"] == "strict"
    (said,) = [text for text in found["remarks"] if "promotion is strict" in text]
    text = " ".join(capsys.readouterr().out.split())
    assert f"JAX runs on {jax.device_count()} x cpu (cpu)" in text
    assert said in text


def test_a_report_names_the_device() -> None:
    found = str(DoctorReport(machine("NVIDIA H100", "9.0"), "", {"jax": "1"}, {}))
    assert "JAX runs on 1 x NVIDIA H100 (gpu), 1.00 GiB each, compute capability 9.0." in found
