"""Lists the kernels that a compiled program runs, with how often, and a TPU's cycles for them."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxmp._tools.hlo.dataflow import Flow
from jaxmp._tools.hlo.parser import Instruction, Module

# What does no work by itself: names for what is there, the ends of what began before, and the
# instructions that run other computations, which are walked into.
_NO_WORK = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
    | {"partition-id", "replica-id", "add-dependency", "opt-barrier", "optimization-barrier"}
)
_NO_WORK_TARGETS = ('"AllocateBuffer"', '"ConcatBitcast"', '"Sharding"', '"SliceId"')
_RUNS_OTHERS = ("while", "call", "conditional", "async-start")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NEVER = 10**13  # what the compiler writes for what it cannot estimate
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")
_BRANCH_LIST = re.compile(r"branch_computations=\{([^}]*)\}")


class Kernel(NamedTuple):
    """An instruction that runs by itself: a fusion, a call of a library, a copy, a collective.

    Attributes:
      instruction: the instruction.
      times: how often it runs in one execution of the program; loops of unknown length count once.
    """

    instruction: Instruction
    times: int


class Schedule:
    """What a program runs.

    Args:
      module: the program.
      weight: what a run of an instruction costs. Of a conditional, the branch counts that costs
        most.

    Attributes:
      flow: the dataflow of the program.
      unknown_loops: names of loops of unknown length.
      conditionals: how many there are.
    """

    def __init__(self, module: Module, weight: Callable[[Instruction], float]) -> None:
        self.flow = Flow(module)
        self.unknown_loops: list[str] = []
        self.conditionals = 0
        self._weight = weight
        self._known: dict[str, list[Kernel]] = {}

    def kernels(self) -> list[Kernel]:
        """Returns the kernels of the program, in the order of its text."""
        (entry,) = (each for each in self.flow.module.computations.values() if each.is_entry)
        return self._of(entry.name)

    def _of(self, computation: str) -> list[Kernel]:
        if computation not in self._known:
            self._known[computation] = []  # ends the recursion if it calls itself
            found = self.flow.module.computations.get(computation)
            instructions = found.instructions.values() if found else ()
            self._known[computation] = [k for each in instructions for k in self._run(each)]
        return self._known[computation]

    def _run(self, instruction: Instruction) -> Iterator[Kernel]:
        if instruction.opcode == "conditional":
            self.conditionals += 1
            yield from max(map(self._of, _branches(instruction)), key=self._total, default=[])
        elif instruction.opcode in _RUNS_OTHERS and instruction.called:
            times = self._turns(instruction)
            for name in instruction.called:
                for kernel in self._of(name):
                    yield Kernel(kernel.instruction, kernel.times * times)
        elif does_work(instruction):
            yield Kernel(instruction, 1)

    def _turns(self, instruction: Instruction) -> int:
        if instruction.opcode != "while":
            return 1
        trips = self.flow.trips(instruction)
        if trips is None:
            self.unknown_loops.append(instruction.name)
        return 1 if trips is None else trips

    def _total(self, kernels: list[Kernel]) -> float:
        return sum(kernel.times * self._weight(kernel.instruction) for kernel in kernels)


def does_work(instruction: Instruction) -> bool:
    """Whether an instruction reads, computes or writes anything by itself."""
    if instruction.opcode in _NO_WORK or instruction.opcode.endswith(("-done", "-update")):
        return False
    if instruction.opcode == "custom-call":
        return not any(target in instruction.structure for target in _NO_WORK_TARGETS)
    return True


def _branches(conditional: Instruction) -> list[str]:
    listed = _BRANCH_LIST.search(conditional.structure)
    if listed:
        return re.findall(r"[\w.\-]+", listed[1])
    return _BRANCHES.findall(conditional.structure)


def cycles_of(instruction: Instruction) -> int:
    """What a TPU's compiler expects one run of an instruction to take; 0 where it says nothing."""
    found = _CYCLES.search(instruction.text)
    cycles = int(found[1]) if found else 0
    return cycles if cycles < _NEVER else 0


def estimated_cycles(text: str) -> tuple[int, int]:
    """What a TPU's compiler expects a program to take, in cycles of the chip.

    Copies that run beside other work have no estimates.

    Args:
      text: the text of a program that was compiled for a TPU.

    Returns:
      The cycles with each body of a loop once, and with all its turns.
    """
    kernels = Schedule(Module(text), cycles_of).kernels()
    each = [(cycles_of(kernel.instruction), kernel.times) for kernel in kernels]
    return sum(cycles for cycles, _ in each), sum(cycles * times for cycles, times in each)
