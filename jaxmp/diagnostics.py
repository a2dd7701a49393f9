"""Tools to look at a run: what overflows, what is lost to underflow, and metrics for loggers."""

from jaxmp._diagnostics.activation_histograms import activation_histograms as activation_histograms
from jaxmp._diagnostics.find_overflow import find_overflow as find_overflow
from jaxmp._diagnostics.histogram_plot import plot_histograms as plot_histograms
from jaxmp._diagnostics.overflow import Overflow as Overflow, OverflowOperand as OverflowOperand
from jaxmp._diagnostics.overflow_report import (
    LeafRange as LeafRange,
    OverflowReport as OverflowReport,
    overflow_report as overflow_report,
)
from jaxmp._diagnostics.scalars import ScalarLog as ScalarLog, scalars as scalars
from jaxmp._diagnostics.underflow_report import (
    UnderflowReport as UnderflowReport,
    UnderflowRow as UnderflowRow,
    underflow_report as underflow_report,
)
from jaxmp._numerics.histograms import Histograms as Histograms, histograms as histograms
