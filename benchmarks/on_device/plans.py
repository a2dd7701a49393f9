"""What `memory_plan` says of the GPT's steps, beside what they took on this device."""

from typing import Any

import jax
from tables import Row

import jaxmp
from jaxmp.diagnostics import memory_plan
from on_device import names
from on_device.gpt import batch_size, model, optimizer
from on_device.recorder import Recorder

_PEAKS = ("peak_bytes", "peak_is_bound", "planned_bytes")
_WIDE = {"policy": "mixed_bfloat16"}
# How each step stores its state, and its options.
_STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    names.AUTOCAST: (_WIDE, {}),
    names.RECOMPUTED: (_WIDE, {"recompute": "auto"}),
    names.SMALL_STATE: ({"policy": "bfloat16", "master": "remainder", "moments": "int8"}, {}),
}


def run(recorder: Recorder) -> None:
    """Records a row for each step, also where the GPT's part has not measured it."""
    recorder.record_machine()
    gpt_rows = {row["contender"]: row for row in recorder.rows("gpt") if "contender" in row}
    size, sequences = model(recorder), batch_size(recorder)
    params = jax.eval_shape(size.init)
    tokens = jax.ShapeDtypeStruct((sequences, size.context + 1), "int32")
    for name, (storage, options) in _STEPS.items():
        gpt_row = gpt_rows.get(name, {})
        row: Row = {key: gpt_row.get(key) for key in _PEAKS}
        if recorder.seconds_left() < 8:
            recorder.record_late(name, **row)
            continue
        tx = jaxmp.mixed_precision(optimizer(), **storage)
        try:
            plan = memory_plan(params, tx, size.loss, tokens, **options)
        except Exception as error:
            row["remark"] = f"plan: {type(error).__name__}: {str(error)[:200]}"
        else:
            row["plan_gib"] = plan.peak / 2**30
            if peak := row["peak_bytes"] or row["planned_bytes"]:
                row["plan_off"] = plan.peak / peak - 1
        recorder.record(contender=name, **row)
