"""Arranges the rows of an audit as a tree: modules, the modules inside of them, and so on."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxmp._inspect.rows import LeftOut, ProductLine, Residual, Upcast


@dataclasses.dataclass
class ModuleNode:
    """A module with the rows of its own lines, and the modules inside of it.

    Attributes:
      name: the last name of its path.
      inside: the modules inside of it, by name.
      products: its products by line, without those of modules inside of it.
      upcasts: its upcasts by line.
      residuals: what its lines keep for the backward pass.
      left_out: its products that a float8 policy left out of float8.
    """

    name: str
    inside: "dict[str, ModuleNode]" = dataclasses.field(default_factory=dict)
    products: list[ProductLine] = dataclasses.field(default_factory=list)
    upcasts: list[Upcast] = dataclasses.field(default_factory=list)
    residuals: list[Residual] = dataclasses.field(default_factory=list)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)

    def all_nodes(self) -> "Iterator[ModuleNode]":
        """Yields the module and all modules inside of it."""
        yield self
        for node in self.inside.values():
            yield from node.all_nodes()

    @property
    def flops(self) -> dict[str, int]:
        """The product FLOPs of the module and those inside of it, by the dtypes of operands.

        Branches that exclude each other are added up.
        """
        return flops_by_dtype(row for node in self.all_nodes() for row in node.products)

    @property
    def kept_bytes(self) -> int:
        """What the module and those inside of it keep for the backward pass, copies included."""
        return sum(row.bytes for node in self.all_nodes() for row in node.residuals)

    @property
    def harmful_upcasts(self) -> int:
        """How many upcasts of the module and those inside of it make products wide."""
        return sum(row.flops > 0 for node in self.all_nodes() for row in node.upcasts)

    def ordered(self) -> "list[ModuleNode]":
        """Returns the modules inside: most FLOPs first, then by name, 2 before 10."""
        return sorted(
            self.inside.values(), key=lambda node: (-sum(node.flops.values()), _natural(node.name))
        )


def module_tree(report: Any) -> ModuleNode:
    """Arranges the lines of a report by module.

    A row stands under the module of its path. Where no module is known, as in plain JAX, it stands
    under the file and the function of its line.

    Args:
      report: an `AuditReport`.

    Returns:
      The root, which stands for the whole program and has no name.
    """
    root = ModuleNode("")
    for kind in ("products", "upcasts", "residuals", "left_out"):
        rows = report.product_lines if kind == "products" else getattr(report, kind)
        for row in rows or ():
            getattr(_node_of(root, row), kind).append(row)
    return root


def _node_of(root: ModuleNode, row: Any) -> ModuleNode:
    node = root
    for name in names_of_place(row.path, row.line):
        node = node.inside.setdefault(name, ModuleNode(name))
    return node


_LINE = re.compile(r"(?P<file>.+):\d+(?: \((?P<function>.+)\))?")


def names_of_place(path: str, line: str) -> list[str]:
    """Returns where a row stands in the tree, from the root.

    >>> names_of_place("LM/Block_0", "net.py:12 (LM.__call__)")
    ['LM', 'Block_0']
    >>> names_of_place("bd,dk->bk", "net.py:12 (loss)")
    ['net.py', 'loss']
    """
    # `jnp.einsum` opens a scope of its own, "bqd,bkd->bqk", which is no module.
    if names := [name for name in path.split("/") if name and "->" not in name]:
        return names
    found = _LINE.fullmatch(line)
    return [name for name in found.group("file", "function") if name] if found else [line]


def dtypes_text(operands: tuple[str, str]) -> str:
    """Formats the dtypes of a product's operands; one name if they are the same.

    >>> dtypes_text(("bfloat16", "bfloat16")), dtypes_text(("bfloat16", "float32"))
    ('bfloat16', 'bfloat16 x float32')
    """
    return operands[0] if operands[0] == operands[1] else " x ".join(operands)


def flops_by_dtype(rows: Iterable[Any]) -> dict[str, int]:
    """Returns the FLOPs of products by the dtypes of operands, most first."""
    found: dict[str, int] = {}
    for row in rows:
        name = dtypes_text(row.operands)
        found[name] = found.get(name, 0) + row.flops
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key with numbers as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
