"""Parses the device groups of a collective, in every syntax that compilers use."""

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_AXIS = r"(?:'(?:[^'\\]|\\.)*'|[^\s=,{}()\[\]:']+)"
_MESH = r"mesh\[[^\]]*\](?:, device_ids=\((?P<ids>[^)]*(?:\)[^){]*)?)\))? \{(?P<over>[^}]*)\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_GROUPS = re.compile(
    rf"replica_groups=(?:(?P<mesh>{_MESH})|(?P<iota>{_IOTA})|(?P<listed>\{{(?:\{{[\d,]*\}},?)*\}}))"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}")


def read_groups(attributes: str, devices: int) -> Groups:
    """Parses the groups of a collective: device positions in the program's device assignment.

    Args:
      attributes: the attributes of the instruction.
      devices: how many devices the program runs on; `{}` means one group of all of them.

    Returns:
      The groups; for a permute, the pairs of source and target.

    Raises:
      ValueError: if the groups have an unknown syntax.

    >>> read_groups("replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add", 8)
    ((0, 2, 4, 6), (1, 3, 5, 7))
    >>> read_groups("replica_groups=mesh['data'=2,'model'=2] {'model'}", 4)
    ((0, 1), (2, 3))
    >>> read_groups("source_target_pairs={{0,1},{1,0}}", 2)
    ((0, 1), (1, 0))
    """
    if pairs := _PAIRS.search(attributes):
        return explicit_groups(pairs.group(1))
    match = _GROUPS.search(attributes)
    if match is None:
        # Without groups, one group has all devices; `{}` below says the same.
        if "replica_groups=" in attributes:
            raise ValueError(f"unknown way of writing replica groups: {attributes[:200]}")
        return (tuple(range(devices)),)
    if match["mesh"]:
        return _mesh_groups(match["mesh"], match["ids"], match["over"])
    if match["iota"]:
        # `[2,4]<=[4,2]T(1,0)` is `arange(8)`, shaped [4,2], transposed, and reshaped to [2,4].
        shape, _, source = match["iota"].partition("<=")
        return _group_rows(_iota(source).reshape(numbers_in(shape)))
    return explicit_groups(match["listed"][1:-1]) or (tuple(range(devices)),)


def explicit_groups(text: str) -> Groups:
    groups = re.findall(r"\{([^}]*)\}", text)
    return tuple(tuple(numbers_in(group)) for group in groups)


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _group_rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in groups.tolist())


def _iota(text: str) -> np.ndarray:
    """Parses the right-hand side of an iota: `[4,2]T(1,0)`."""
    sizes, _, order = text.partition("T")
    numbers = np.arange(math.prod(numbers_in(sizes))).reshape(numbers_in(sizes))
    return numbers.transpose(numbers_in(order)) if order else numbers


def _mesh_groups(mesh: str, ids: str | None, over: str) -> Groups:
    """Parses groups over mesh axes.

    `mesh['a'=8,'b'=2] {'b','a':(2)2}` extends along b, and along the middle dimension of a, if a
    is reshaped to [2,2,2].
    """
    sizes_by_name = re.findall(rf"({_AXIS})=(\d+)", mesh[: mesh.index("]")].removeprefix("mesh["))
    axes = {name: int(size) for name, size in sizes_by_name}
    # A part of an axis is written as the product of the sizes before it, and its own size.
    parts = [
        (name, int(before or 1), int(size or axes[name]))
        for name, before, size in re.findall(rf"({_AXIS})(?::\((\d+)\)(\d+))?", over)
    ]
    sizes: list[int] = []
    dimensions: dict[tuple[str, int], int] = {}  # of each part
    for name, size in axes.items():
        product = 1
        for _, before, along in sorted(part for part in parts if part[0] == name):
            dimensions[name, before] = len(sizes) + 1
            sizes += [before // product, along]
            product = before * along
        sizes.append(size // product)
    # The devices of a group come last, and vary in the order in which the parts are written.
    last = [dimensions[name, before] for name, before, _ in parts]
    first = [dimension for dimension in range(len(sizes)) if dimension not in last]
    positions = np.arange(math.prod(sizes))
    if ids:
        positions = _iota(ids.rpartition("<=")[2]) if "[" in ids else np.asarray(numbers_in(ids))
    group = math.prod(along for _, _, along in parts)
    return _group_rows(positions.reshape(sizes).transpose(first + last).reshape(-1, group))
