"""Programs of some lines, as compilers write them."""

from jaxmp._tools.hlo.collectives import CompiledProgram, Transfer, read_program

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def program(*lines: str, before: str = ADD, devices: int = 8) -> CompiledProgram:
    """Reads a program of some lines."""
    body = "\n".join(f"  {line}" for line in lines)
    header = f"HloModule test, num_partitions={devices}\n{before}"
    return read_program(f"{header}\nENTRY %main () -> () {{\n{body}\n}}\n")


def only(*lines: str, **options: object) -> Transfer:
    """The one transfer of a program."""
    (transfer,) = program(*lines, **options).transfers
    return transfer
