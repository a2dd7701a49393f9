"""A table of the dtypes in which modules compute, to print or to inspect."""

import dataclasses
import io
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One module of a model.

    Attributes:
      path: the names from the root, joined by `/`; `""` is the model itself.
      type: the name of the class.
      param: the dtypes of the module's own params.
      compute: the module's `dtype`: empty if it has none, "from inputs" if it is None.
      output: the dtypes of its result; empty if unknown.
      params: the number of elements in its own params.
      reached: false if a policy cannot set the dtype in which the module uses its params: the
        module has no `dtype`, and its params are wider than the compute dtype.
    """

    path: str
    type: str
    param: str
    compute: str
    output: str
    params: int
    # Nearly always true, and so not in the repr.
    reached: bool = dataclasses.field(default=True, repr=False)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The modules of a model and their dtypes. It prints as a table.

    Attributes:
      rows: one row for each module.
    """

    rows: tuple[Row, ...]

    @property
    def params(self) -> int:
        """The number of elements in all params."""
        return sum(row.params for row in self.rows)

    @property
    def unreached(self) -> int:
        """The number of elements in the params that no policy reaches."""
        return sum(row.params for row in self.rows if not row.reached)

    def __rich__(self) -> Any:
        # Who prints no table does not pay for the import of rich.
        from rich.table import Table

        caption = f"{self.params:,} params"
        if self.unreached:
            share = f"{self.unreached / self.params:.0%}"
            caption += f", of which no policy reaches {self.unreached:,} ({share})"
        table = Table(caption=caption, caption_justify="left")
        # A cut path would name no module: fold it.
        for name in ("path", "type", "params in", "computes in", "returns"):
            table.add_column(name, overflow="fold")
        table.add_column("params", justify="right")
        for row in self.rows:
            table.add_row(
                row.path or "(root)",
                row.type,
                row.param,
                row.compute if row.reached else "(as its params)",
                row.output,
                f"{row.params:,}" if row.params else "",
            )
        return table

    def __str__(self) -> str:
        from rich.console import Console

        # Neither the width of a terminal nor a notebook changes the text.
        text = io.StringIO()
        Console(file=text, width=120, color_system=None, force_jupyter=False).print(self)
        return text.getvalue().rstrip()


def dtype_text(arrays: Iterable[Any]) -> str:
    """Lists the dtypes of arrays, in order of first occurrence.

    >>> import numpy as np
    >>> dtype_text([np.zeros(2, np.float32), np.zeros(2, np.int32), np.zeros(1, np.float32)])
    'float32, int32'
    """
    return ", ".join(dict.fromkeys(str(x.dtype) for x in arrays))
