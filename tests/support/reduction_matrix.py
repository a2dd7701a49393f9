"""What must hold of a mixed-precision gradient on any mesh, whoever wrote the model."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import pytest

import jaxmp
from tests.support import sharded_models as models

MakeMesh = Callable[[tuple[int, ...], tuple[str, ...]], jax.sharding.Mesh]
Key = tuple[models.Author, models.Mode, bool]


def landing(shift: int) -> set[Key]:
    """Six cases, `(author, mode, remat)`, for before each change lands; another six per `shift`.

    Each mode once and `fsdp` twice, where most can go wrong; authors and checkpoints by turns.
    """
    modes = sorted([*models.MODES, "fsdp"])
    turns = range(shift, shift + len(modes))
    return {(models.AUTHORS[i % 3], mode, i % 2 == 0) for i, mode in zip(turns, modes, strict=True)}


def cases(shift: int, at_most: int = 6) -> list[Any]:
    """All cases as params of pytest; those that `landing` leaves out take turns."""
    keys = itertools.product(models.AUTHORS, models.MODES, (True, False))
    chosen = sorted(landing(shift))[:at_most]
    return [pytest.param(*k, marks=[] if k in chosen else pytest.mark.exhaustive) for k in keys]


def moves(report: Any) -> int:
    """Elements that change place among devices for no sum and no gather of params."""
    return sum(
        row.elements * row.runs
        for row in report
        if row.kind in ("all-to-all", "collective-permute")
        or (row.kind == "all-gather" and row.dtype.startswith("int"))
    )


def gathers(report: Any, *dtypes: str) -> int:
    """Elements of params that are gathered in some dtypes."""
    rows = (row for row in report if row.kind == "all-gather" and "data" in row.axes)
    return sum(row.elements * row.runs for row in rows if row.dtype in dtypes)


def whole(report: Any) -> int:
    """Elements that are gathered, of whatever."""
    return sum(row.elements * row.runs for row in report if row.kind == "all-gather")


def narrow_sums(report: Any, axis: str) -> int:
    """Bytes of sums in 16 bits over a mesh axis that gradients are summed over."""
    return sum(
        row.bytes
        for row in report
        if row.sums and row.dtype in ("bfloat16", "float16") and axis in row.axes
    )


class Case:
    """A model of an author on one mesh, compiled as often as there are things to compare."""

    def __init__(
        self, author: models.Author, mode: models.Mode, remat: bool, make_mesh: MakeMesh
    ) -> None:
        self.author, self.mode = author, mode
        self.mixed = models.model(author, "bfloat16", remat=remat)
        self.float32 = models.model(author, "float32", remat=remat)
        # Autocast looks tokens up in a float32 table, unless it is told to gather a narrow one.
        dtype = "bfloat16" if author == "plain" else None
        self.place = models.placement(mode, self.mixed.params, make_mesh, dtype)
        self.place_float32 = models.placement(mode, self.mixed.params, make_mesh)
        self.args = (
            models.abstract(self.mixed.params, self.place.params),
            models.batch(self.place.batch),
        )

    def lowered(self, which: Literal["plain", "ours", "wide"]) -> Any:
        """The gradient of plain JAX, ours, or the same in float32."""
        model, options = self.mixed, {}
        if which == "ours":
            options = {"reduce_dtype": "float32", "fsdp": self.place.fsdp}
        elif which == "wide":
            model = self.float32
            options = {"reduce_dtype": "float32", "fsdp": self.place_float32.fsdp}

        def grads(params: Any, batch: Any) -> Any:
            return model.grads(params, batch, **options)

        return jax.jit(grads, out_shardings=self.place.params).lower(*self.args)


def check(case: Case, read: Callable[[Any], Any]) -> None:
    """Compares the collectives of the programs; `read` gives the report of a lowered one."""
    ours = read(case.lowered("ours"))
    for axis in case.place.reduces_over:
        assert narrow_sums(ours, axis) == 0, ours
    # Positive control. (In the model that nobody annotated, autocast has made products float32.)
    if case.author != "plain":
        plain = read(case.lowered("plain"))
        assert all(narrow_sums(plain, axis) for axis in case.place.reduces_over), plain
    if case.mode == "dp":
        assert moves(ours) == 0, ours
    if case.mode == "tp":
        wide = read(case.lowered("wide"))
        assert moves(ours) + whole(ours) <= moves(wide) + whole(wide), (ours, wide)
    if case.place.fsdp is not None:
        wide = read(case.lowered("wide"))
        assert moves(ours) <= moves(wide), (ours, wide)
        assert gathers(ours, "float32") == 0, ours
        # Half the bytes of float32. (Where a TPU multiplies float32 in bfloat16 it gathers so too.)
        all_of_them = gathers(wide, "float32", "bfloat16")
        assert gathers(ours, "bfloat16") == all_of_them > 0, (ours, wide)


def traffic(report: Any) -> dict[tuple[str, str, str], int]:
    """Bytes of each kind of collective, in each dtype."""
    found: dict[tuple[str, str, str], int] = {}
    for row in report:
        key = row.kind, row.dtype, row.reducer
        found[key] = found.get(key, 0) + row.bytes * row.runs
    return found


def check_alike(case: Case, other: Case, read: Callable[[Any], Any]) -> None:
    """Compares our gradients on two meshes: what their collectives carry must be the same."""
    ours = traffic(read(case.lowered("ours")))
    assert ours == traffic(read(other.lowered("ours")))
    assert sum(ours.values()) > 0


def collectives_of(case: Case) -> Callable[[Any], Any]:
    return lambda program: jaxmp.sharding.collectives(program, mesh=case.place.mesh)
