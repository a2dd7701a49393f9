"""Tools that answer before a run, what it will cost, and during it, which operation overflows."""

from jaxmp._diagnostics.activation_histograms import activation_histograms as activation_histograms
from jaxmp._diagnostics.compare import compare as compare
from jaxmp._diagnostics.find_overflow import find_overflow as find_overflow
from jaxmp._diagnostics.histogram_plot import plot_histograms as plot_histograms
from jaxmp._diagnostics.log_probs import log_prob_gap as log_prob_gap
from jaxmp._diagnostics.overflow_report import (
    overflow_report as overflow_report,
)
from jaxmp._diagnostics.scalars import ScalarLog as ScalarLog, scalars as scalars
from jaxmp._diagnostics.sensitivity import sensitivity as sensitivity
from jaxmp._diagnostics.underflow_report import (
    underflow_report as underflow_report,
)
from jaxmp._numerics.histograms import histograms as histograms
from jaxmp._planning.absent_devices import absent_devices as absent_devices
from jaxmp._planning.benchmark import benchmark as benchmark
from jaxmp._planning.devices import (
    DEVICES as DEVICES,
    Device as Device,
    Peaks as Peaks,
    find_device as find_device,
)
from jaxmp._planning.memory_plan import memory_plan as memory_plan
