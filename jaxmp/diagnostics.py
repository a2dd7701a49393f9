"""Tools that answer before and during a run: what it will take, and what goes wrong in it."""

from jaxmp._diagnostics.find_overflow import find_overflow as find_overflow
from jaxmp._diagnostics.overflow import Overflow as Overflow, OverflowOperand as OverflowOperand
from jaxmp._diagnostics.overflow_report import (
    LeafRange as LeafRange,
    OverflowReport as OverflowReport,
    overflow_report as overflow_report,
)
from jaxmp._planning.memory_plan import memory_plan as memory_plan
from jaxmp._planning.memory_rows import MemoryPlan as MemoryPlan, MemoryRow as MemoryRow
