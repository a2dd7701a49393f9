"""What `memory_plan` says of the GPT's steps, beside what they took on this device."""

from typing import Any

import jax

from jaxmp.diagnostics import memory_plan
from on_device import names
from on_device.gpt import batch_size, model, optimizer
from on_device.recorder import Recorder

_GIB = 2**30
_STEPS: dict[str, dict[str, Any]] = {
    names.AUTOCAST: {},
    names.RECOMPUTED: {"recompute": "auto"},
    names.SMALL_STATE: {
        "policy": "bfloat16",
        "master": "remainder",
        "moments": "int8",
    },
}


def run(recorder: Recorder) -> None:
    """Records a row for each step that the GPT's part has measured, or could have."""
    recorder.record_machine()
    measured = {row["contender"]: row for row in recorder.rows("gpt") if "contender" in row}
    size, sequences = model(recorder), batch_size(recorder)
    params = jax.eval_shape(size.init)
    tokens = jax.ShapeDtypeStruct((sequences, size.context + 1), "int32")
    rows: dict[str, dict[str, Any]] = {}
    # First all estimates, which take seconds, then what the compiler for an H100 says.
    for compiled in (False, True):
        for name, options in _STEPS.items():
            row = rows.setdefault(name, {"contender": name} | _taken(measured.get(name, {})))
            key = "compiled_plan" if compiled else "plan"
            if recorder.seconds_left() < 8:
                row["remark"] = "not planned: out of time"
                recorder.record(**row)
                continue
            try:
                plan = memory_plan(
                    params,
                    **{"policy": "mixed_bfloat16", "optimizer": optimizer()} | options,
                    loss_fn=size.loss,
                    batch=tokens,
                    compiled=compiled,
                )
            except Exception as error:
                row["remark"] = f"{key}: {type(error).__name__}: {str(error)[:200]}"
            else:
                row[f"{key}_gib"] = plan.peak / _GIB
                if peak := row["peak_gib"] or row["planned_gib"]:
                    row[f"{key}_off"] = plan.peak / _GIB / peak - 1
            recorder.record(**row)


def _taken(row: dict[str, Any]) -> dict[str, Any]:
    """The bytes of a row of the GPT's part, in GiB."""
    sizes = {"peak_gib": row.get("peak_bytes"), "planned_gib": row.get("planned_bytes")}
    return {key: value and value / _GIB for key, value in sizes.items()}
