"""Reads the text of a compiled program: computations, instructions, and where they come from."""

import dataclasses
import functools
import re
from typing import NamedTuple

_COMMENT = re.compile(r"/\*.*?\*/")  # /*index=5*/ in long tuples
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
# The shape of a tuple has spaces and parentheses, but no word right before a parenthesis.
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)((?:#\d+)*)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_NUMBERED = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")


class Frame(NamedTuple):
    """A source line that an instruction comes from."""

    file: str
    line: int
    function: str


class Operand(NamedTuple):
    """The name of an operand, and which element of it if it is a tuple (`%while.1#2`)."""

    name: str
    element: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      shape: the text of the result's shape.
      opcode: `"all-reduce"`, `"fusion"`, ...
      rest: what follows the parenthesis behind the opcode.
      computation: the name of the computation that it is in.
    """

    name: str
    shape: str
    opcode: str
    rest: str
    computation: str

    @functools.cached_property
    def _split(self) -> tuple[str, str]:
        """The operands, and the attributes behind them."""
        depth = 1
        for found in re.finditer(r"[()]", self.rest):
            depth += 1 if found.group() == "(" else -1
            if depth == 0:
                return self.rest[: found.start()], self.rest[found.end() :]
        return self.rest, ""

    @property
    def argument(self) -> str:
        """The text between the parentheses: a parameter's number, a constant's value."""
        return self._split[0]

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """What it is computed from."""
        return tuple(
            Operand(name, int(element.rpartition("#")[2]) if element else None)
            for name, element in _NAME.findall(self.argument)
        )

    @property
    def attributes(self) -> str:
        """Everything behind the operands."""
        return self._split[1]

    @property
    def structure(self) -> str:
        """The attributes before the metadata, where names of users cannot be mistaken for them."""
        return self.attributes.partition(", metadata={")[0]

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs or reduces with."""
        names: list[str] = []
        for one, several in _CALLED.findall(self.structure):
            names += [one] if one else re.findall(r"[\w.\-]+", several)
        return tuple(names)

    @property
    def op_name(self) -> str:
        """JAX's name of the operation with its scopes: `"jit(f)/transpose(jvp())/dot_general"`."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found.group(1).replace("\\'", "'") if found else ""


class Computation(NamedTuple):
    """A list of instructions; the root is its result."""

    name: str
    is_entry: bool
    instructions: dict[str, Instruction]
    root: list[Instruction]  # one, or none in a fragment


class Module:
    """A program.

    Args:
      text: as the compiler prints it.

    Attributes:
      devices: how many devices it runs on.
      computations: by name.
      callers: for each computation, the instructions that run it.
    """

    def __init__(self, text: str) -> None:
        self.devices = 1
        self.computations: dict[str, Computation] = {}
        self.callers: dict[str, list[Instruction]] = {}
        self._tables: dict[str, dict[int, str]] = {}
        self._read(text)
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                # The end of an asynchronous call names what its start has run.
                may_call = "=%" in instruction.rest or "_computations={" in instruction.rest
                if may_call and not instruction.opcode.endswith(("-done", "-update")):
                    for name in instruction.called:
                        self.callers.setdefault(name, []).append(instruction)

    def _read(self, text: str) -> None:
        current: Computation | None = None
        table: dict[int, str] = {}
        for line in _COMMENT.sub("", text).splitlines():
            if line.startswith(" "):
                found = _INSTRUCTION.match(line)
                if found and current is not None:
                    is_root, name, shape, opcode, rest = found.groups()
                    made = Instruction(name, shape, opcode, rest, current.name)
                    current.instructions[name] = made
                    if is_root:
                        current.root.append(made)
            elif line.startswith("HloModule"):
                for number in re.findall(r"(?:replica_count|num_partitions)=(\d+)", line):
                    self.devices *= int(number)
            elif found := _COMPUTATION.match(line):
                current = Computation(found.group(2), found.group(1) is not None, {}, [])
                self.computations[current.name] = current
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables.setdefault(line, {})
            elif found := _NUMBERED.match(line):
                table[int(found.group(1))] = found.group(2)

    def find(self, computation: str, name: str) -> Instruction | None:
        """An instruction by its name, which holds within its computation."""
        found = self.computations.get(computation)
        return found.instructions.get(name) if found else None

    def root(self, computation: str) -> Instruction | None:
        """The result of a computation."""
        found = self.computations.get(computation)
        return found.root[-1] if found and found.root else None

    def frames(self, instruction: Instruction) -> list[Frame]:
        """The source lines of an instruction, the innermost first."""
        metadata = instruction.attributes.partition("metadata={")[2]
        if found := re.search(r"\bstack_frame_id=(\d+)", metadata):
            return self._stack(int(found.group(1)))
        file = re.search(r'\bsource_file="((?:[^"\\]|\\.)*)"', metadata)
        line = re.search(r"\bsource_line=(\d+)", metadata)
        return [Frame(file.group(1), int(line.group(1)), "")] if file and line else []

    def _stack(self, number: int) -> list[Frame]:
        frames: list[Frame] = []
        while number in self._stack_frames and len(frames) < 100:
            location, number = self._stack_frames[number]
            fields = _fields(self._tables.get("FileLocations", {}).get(location, ""))
            file = self._string("FileNames", fields.get("file_name_id", 0))
            function = self._string("FunctionNames", fields.get("function_name_id", 0))
            frames.append(Frame(file, fields.get("line", 0), function))
        return frames

    @functools.cached_property
    def _stack_frames(self) -> dict[int, tuple[int, int]]:
        """For each frame its location and its parent, which is 0 for the outermost."""
        rows = {n: _fields(row) for n, row in self._tables.get("StackFrames", {}).items()}
        parents = [row.get("parent_frame_id", 0) for row in rows.values()]
        # Compilers write the parent's number plus one, so that an outermost frame names itself.
        shift = min(parents, default=0)
        return {
            n: (row.get("file_location_id", 0), row.get("parent_frame_id", 0) - shift)
            for n, row in rows.items()
        }

    def _string(self, table: str, number: int) -> str:
        found = _QUOTED.match(self._tables.get(table, {}).get(number, ""))
        return found.group(1) if found else ""


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(row)}
