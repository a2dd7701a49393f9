"""Parses the text of a compiled program: computations, instructions, source lines and shapes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_COMMENT = re.compile(r"/\*.*?\*/")  # /*index=5*/ in long tuples
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
# A tuple's shape has spaces and parentheses, but never a word directly before a parenthesis.
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
    """The source line of an instruction."""

    file: str
    line: int
    function: str


class Operand(NamedTuple):
    """An operand: its name, and the element number if it is one of a tuple (`%while.1#2`)."""

    name: str
    element: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      name: the name without the percent sign.
      shape: the text of the result's shape.
      opcode: `"all-reduce"`, `"fusion"`, ...
      text: the text after the parenthesis that follows the opcode.
      computation: the name of the computation that contains the instruction.
    """

    name: str
    shape: str
    opcode: str
    text: str
    computation: str

    @functools.cached_property
    def _split(self) -> tuple[str, str]:
        """The text of the operands, and the text of the attributes after them."""
        # Operands may have parentheses of their own, such as the tiles of a layout: count them.
        depth = 1
        for match in re.finditer(r"[()]", self.text):
            depth += 1 if match.group() == "(" else -1
            if depth == 0:
                return self.text[: match.start()], self.text[match.end() :]
        return self.text, ""

    @property
    def argument(self) -> str:
        """The text between the parentheses: a parameter's number, a constant's value."""
        return self._split[0]

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of the instruction."""
        return tuple(
            Operand(name, int(element.rpartition("#")[2]) if element else None)
            for name, element in _NAME.findall(self.argument)
        )

    @property
    def attributes(self) -> str:
        """The text after the operands."""
        return self._split[1]

    @property
    def structure(self) -> str:
        """The attributes before the metadata."""
        # Users choose the names in the metadata, and may choose one like `body=x`.
        return self.attributes.partition(", metadata={")[0]

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that the instruction runs or reduces with."""
        names: list[str] = []
        for single, several in _CALLED.findall(self.structure):
            names += [single] if single else re.findall(r"[\w.\-]+", several)
        return tuple(names)

    @property
    def op_name(self) -> str:
        """JAX's name of the operation with its scopes: `"jit(f)/transpose(jvp())/dot_general"`."""
        match = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        # Compilers escape apostrophes, as in a scope named x['a'].
        return match.group(1).replace("\\'", "'") if match else ""


class Computation(NamedTuple):
    """A list of instructions; the root is its result."""

    name: str
    is_entry: bool
    instructions: dict[str, Instruction]
    root: list[Instruction]  # one, or none in a fragment


class Module:
    """A program, from its text as the compiler prints it.

    Attributes:
      devices: how many devices the program runs on: replicas of so many partitions each.
      partitions: how many devices share one replica.
      computations: the computations by name.
      callers: for each computation, the instructions that run it.
    """

    def __init__(self, text: str) -> None:
        self.devices = self.partitions = 1
        self.computations: dict[str, Computation] = {}
        self.callers: dict[str, list[Instruction]] = {}
        self._tables: dict[str, dict[int, str]] = {}
        self._read(text)
        for instruction in self.instructions():
            # Most lines call nothing: a search of the text is faster than to split it.
            may_call = "=%" in instruction.text or "_computations={" in instruction.text
            # The end of an asynchronous call names the same computation as its start.
            if may_call and not instruction.opcode.endswith(("-done", "-update")):
                for name in instruction.called:
                    self.callers.setdefault(name, []).append(instruction)

    def _read(self, text: str) -> None:
        current: Computation | None = None
        table: dict[int, str] = {}
        for line in _COMMENT.sub("", text).splitlines():
            if line.startswith(" "):
                match = _INSTRUCTION.match(line)
                if match and current is not None:
                    is_root, name, shape, opcode, tail = match.groups()
                    instruction = Instruction(name, shape, opcode, tail, current.name)
                    current.instructions[name] = instruction
                    if is_root:
                        current.root.append(instruction)
            elif line.startswith("HloModule"):
                counts = dict(re.findall(r"\b(replica_count|num_partitions)=(\d+)", line))
                self.partitions = int(counts.get("num_partitions", 1))
                self.devices = self.partitions * int(counts.get("replica_count", 1))
            elif match := _COMPUTATION.match(line):
                current = Computation(match.group(2), match.group(1) is not None, {}, [])
                self.computations[current.name] = current
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables.setdefault(line, {})
            elif match := _NUMBERED.match(line):
                table[int(match.group(1))] = match.group(2)

    def instructions(self) -> Iterator[Instruction]:
        """Yields the instructions of all computations, in the order of the text."""
        for computation in self.computations.values():
            yield from computation.instructions.values()

    def find(self, computation: str, name: str) -> Instruction | None:
        """Finds an instruction by its name, which is unique within its computation."""
        scope = self.computations.get(computation)
        return scope.instructions.get(name) if scope else None

    def root(self, computation: str) -> Instruction | None:
        """Returns the instruction that computes the result of a computation."""
        scope = self.computations.get(computation)
        return scope.root[-1] if scope and scope.root else None

    def frames(self, instruction: Instruction) -> list[Frame]:
        """Returns the source lines of an instruction, innermost first."""
        metadata = instruction.attributes.partition("metadata={")[2]
        match = re.search(r"\bstack_frame_id=(\d+)", metadata)
        if match is None:
            file = re.search(r'\bsource_file="((?:[^"\\]|\\.)*)"', metadata)
            line = re.search(r"\bsource_line=(\d+)", metadata)
            return [Frame(file.group(1), int(line.group(1)), "")] if file and line else []
        frames: list[Frame] = []
        number = int(match.group(1))
        # The bound ends circles: an outermost frame may name itself as its parent.
        while number in self._stack_frames and len(frames) < 100:
            location, number = self._stack_frames[number]
            fields = _numbered_fields(self._tables.get("FileLocations", {}).get(location, ""))
            path = self._string("FileNames", fields.get("file_name_id", 0))
            function = self._string("FunctionNames", fields.get("function_name_id", 0))
            frames.append(Frame(path, fields.get("line", 0), function))
        return frames

    @functools.cached_property
    def _stack_frames(self) -> dict[int, tuple[int, int]]:
        """The location and the parent of each frame; the outermost frame has parent 0."""
        rows = {n: _numbered_fields(row) for n, row in self._tables.get("StackFrames", {}).items()}
        parents = [row.get("parent_frame_id", 0) for row in rows.values()]
        # Compilers may write the parent's number plus one; an outermost frame then names itself.
        shift = min(parents, default=0)
        return {
            n: (row.get("file_location_id", 0), row.get("parent_frame_id", 0) - shift)
            for n, row in rows.items()
        }

    def _string(self, table: str, number: int) -> str:
        match = _QUOTED.match(self._tables.get(table, {}).get(number, ""))
        return match.group(1) if match else ""


def _numbered_fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(row)}


_LAYOUT = re.compile(r"\{[^{}]*\}")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_KINDS = {"f": "float", "s": "int", "u": "uint", "c": "complex", "bf": "bfloat"}


class Array(NamedTuple):
    """An array: its JAX dtype name and its number of elements."""

    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        """The size in bytes; two 4-bit numbers share a byte."""
        return -(-self.elements * bits(self.dtype) // 8)


Shape = Array | list[Any]  # a list of shapes for a tuple


def read_shape(text: str) -> Shape:
    """Parses a shape.

    >>> read_shape("((bf16[8,128]{1,0:T(8,128)(2,1)S(1)}), u32[]{:S(2)})")
    [[Array(dtype='bfloat16', elements=1024)], Array(dtype='uint32', elements=1)]
    """
    stack: list[list[Shape]] = [[]]
    text = _LAYOUT.sub("", text)  # layouts have parentheses of their own: the tiles
    for match in re.finditer(r"\(|\)|" + _ARRAY.pattern, text):
        if match.group() == "(":
            stack.append([])
        elif match.group() == ")":
            if len(stack) > 1:
                inner = stack.pop()
                stack[-1].append(inner)
        else:
            sizes = [int(n) for n in re.findall(r"\d+", match.group(2))]
            stack[-1].append(Array(dtype_of_hlo(match.group(1)), math.prod(sizes)))
    return stack[0][0] if stack[0] else []


def arrays_in(shape: Shape) -> list[Array]:
    """Returns all arrays of a shape.

    >>> arrays_in(read_shape("(f32[2], (pred[]))"))
    [Array(dtype='float32', elements=2), Array(dtype='bool', elements=1)]
    """
    if isinstance(shape, Array):
        return [shape]
    return [array for part in shape for array in arrays_in(part)]


def dtype_of_hlo(short: str) -> str:
    """Returns JAX's name for an HLO dtype.

    >>> [dtype_of_hlo(name) for name in ("bf16", "f8e4m3fn", "s32", "pred", "c64", "token")]
    ['bfloat16', 'float8_e4m3fn', 'int32', 'bool', 'complex64', 'token']
    """
    if short == "pred":
        return "bool"
    match = re.fullmatch(r"(bf|[fsuc])(\d+)(\w*)", short)
    if match is None:
        return short
    kind, size, format_ = match.groups()
    return _KINDS[kind] + size + (f"_{format_}" if format_ else "")


def bits(dtype: str) -> int:
    """Returns the bits of one number of a dtype; 0 if the dtype is not numeric.

    >>> bits("float8_e4m3fn"), bits("bool"), bits("int4"), bits("token")
    (8, 8, 4, 0)
    """
    if dtype == "bool":
        return 8
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match.group(1)) if match else 0
