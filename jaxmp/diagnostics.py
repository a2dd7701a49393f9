"""Tools that say before a run what it will cost, and during it which operation overflows."""

import typing as _typing

from jaxmp._numerics.histograms import histograms as histograms
from jaxmp._numerics.removed_names import without as _without
from jaxmp._tools.diagnostics.activation_histograms import (
    activation_histograms as activation_histograms,
)
from jaxmp._tools.diagnostics.compare import compare as compare
from jaxmp._tools.diagnostics.find_overflow import find_overflow as find_overflow
from jaxmp._tools.diagnostics.histogram_plot import plot_histograms as plot_histograms
from jaxmp._tools.diagnostics.log_probs import log_prob_gap as log_prob_gap
from jaxmp._tools.diagnostics.scalars import scalar_log as scalar_log, scalars as scalars
from jaxmp._tools.diagnostics.sensitivity import sensitivity as sensitivity
from jaxmp._tools.diagnostics.underflow_report import (
    underflow_report as underflow_report,
)
from jaxmp._tools.planning.absent_devices import absent_devices as absent_devices
from jaxmp._tools.planning.devices import (
    DEVICES as DEVICES,
    find_device as find_device,
)
from jaxmp._tools.planning.memory_plan import memory_plan as memory_plan

if not _typing.TYPE_CHECKING:  # for a type checker, any name would be there
    __getattr__ = _without(
        "jaxmp.diagnostics",
        {
            "Device": 'jaxmp.diagnostics.find_device("h100"), which returns one',
            "Peaks": 'jaxmp.diagnostics.find_device("h100").peaks',
            "ScalarLog": "with jaxmp.diagnostics.scalar_log(write) as log: log(step, metrics)",
            "benchmark": "time.perf_counter() around steps, and jax.block_until_ready(...)",
            "overflow_report": "jaxmp.diagnostics.underflow_report(grads, loss_scale=...), whose "
            "rows have infinite, nan, largest and overflow",
        },
    )
