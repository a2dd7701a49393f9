"""Tools for a run that goes wrong: which operation overflows, and in which gradients it shows."""

from jaxmp._diagnostics.compare import compare as compare
from jaxmp._diagnostics.comparison import (
    Comparison as Comparison,
    Difference as Difference,
    Unmatched as Unmatched,
)
from jaxmp._diagnostics.find_overflow import find_overflow as find_overflow
from jaxmp._diagnostics.log_probs import LogProbGap as LogProbGap, log_prob_gap as log_prob_gap
from jaxmp._diagnostics.overflow import Overflow as Overflow, OverflowOperand as OverflowOperand
from jaxmp._diagnostics.overflow_report import (
    LeafRange as LeafRange,
    OverflowReport as OverflowReport,
    overflow_report as overflow_report,
)
from jaxmp._diagnostics.sensitivity import sensitivity as sensitivity
from jaxmp._diagnostics.sensitivity_report import (
    Errors as Errors,
    PartSensitivity as PartSensitivity,
    SensitivityReport as SensitivityReport,
)
