"""Tools that answer before a run, what it will cost, and during it, which operation overflows."""

from jaxmp._diagnostics.find_overflow import find_overflow as find_overflow
from jaxmp._diagnostics.overflow import Overflow as Overflow, OverflowOperand as OverflowOperand
from jaxmp._diagnostics.overflow_report import (
    LeafRange as LeafRange,
    OverflowReport as OverflowReport,
    overflow_report as overflow_report,
)
from jaxmp._planning.absent_devices import absent_devices as absent_devices
from jaxmp._planning.benchmark import benchmark as benchmark
from jaxmp._planning.benchmark_report import (
    BenchmarkReport as BenchmarkReport,
    PolicyTiming as PolicyTiming,
)
from jaxmp._planning.cost import CostEstimate as CostEstimate, KernelCost as KernelCost
from jaxmp._planning.devices import (
    DEVICES as DEVICES,
    Device as Device,
    Peaks as Peaks,
    find_device as find_device,
)
from jaxmp._planning.estimate import estimate as estimate, read_cost as read_cost
