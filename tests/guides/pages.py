"""The guides of docs/from as programs: what they set up, and what runs before and after."""

import dataclasses
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
FOLDER = _ROOT / "docs" / "from"
_RECORDED = pathlib.Path(__file__).parent / "recorded"
_BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TORCH_PARAMS = "{'up': model[0].weight, 'down': model[2].weight}"
_EQUINOX_PARAMS = "eqx.filter(model, eqx.is_array)"
# What the program before prints: all that is compared.
_REPORT = """
import json as _json, importlib.metadata as _metadata, jax as _jax, numpy as _np
_found = {{"versions": {{name: _metadata.version(name) for name in {distributions!r}}}}}
_found["losses"] = losses
_found["scales"] = globals().get("scales", [])
_leaves = _jax.tree.leaves({params})
_found["params"] = [_np.round(_np.asarray({listed}, "f8"), 7).tolist() for leaf in _leaves]
print("REPORT" + _json.dumps(_found))
"""


def skip_where_absent(*distributions: str) -> None:
    """Skips a test that needs what is not installed."""
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")


@dataclasses.dataclass(frozen=True)
class Guide:
    """A guide whose two programs are compared, by losses and by the params that they end with.

    The program before runs where its distributions are installed, and was recorded elsewhere;
    without any it runs in each test. Params of torch are tensors, whose matrices are transposed.
    """

    name: str
    distributions: tuple[str, ...]
    before: str
    after: str
    loss: float
    error: float
    torch: bool = False
    processes: int = 1

    @property
    def text(self) -> str:
        """The page."""
        return (FOLDER / f"{self.name}.md").read_text()

    @property
    def recorded(self) -> Any:
        """What the program before printed where it was recorded."""
        return json.loads((_RECORDED / f"{self.name}.json").read_text())

    def program(self, section: str) -> str:
        """The code that both programs share, which is the page's first, and that of a section."""
        first, *sections = re.split(r"^## ", self.text, flags=re.MULTILINE)
        (own,) = (part for part in sections if part.startswith(f"{section}\n"))
        return "".join(_BLOCK.findall(first) + _BLOCK.findall(own))

    def run_before(self, folder: pathlib.Path) -> Any:
        """Runs the program before in processes of its own, and returns what it came to."""
        listed = "getattr(leaf, 'full_tensor', lambda: leaf)().detach().T" if self.torch else "leaf"
        report = _REPORT.format(distributions=self.distributions, listed=listed, params=self.before)
        script = folder / "before.py"  # not its name, which may be that of what it imports
        script.write_text(self.program("Before") + report)
        several = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.processes)]
        found = subprocess.run(
            [sys.executable, *(several if self.processes > 1 else []), str(script)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = [line for line in found.stdout.splitlines() if "REPORT" in line]
        assert lines, found.stderr[-3000:]
        return json.loads(lines[0].partition("REPORT")[2])

    def run_after(self, program: str | None = None) -> Any:
        """Runs the program after here, or one that was made of it; returns what it came to."""
        names: dict[str, Any] = {}
        code = self.program("After") if program is None else program
        exec(compile(code, f"docs/from/{self.name}.md", "exec"), names)
        params = jax.tree.leaves(eval(self.after, names))
        return {
            "losses": names["losses"],
            "scales": names.get("scales", []),
            "params": [np.asarray(leaf) for leaf in params],
        }

    def record(self, folder: pathlib.Path) -> None:
        """Runs the program before, and writes what it came to."""
        found = json.dumps(self.run_before(folder))
        (_RECORDED / f"{self.name}.json").write_text(found + "\n")


GUIDES = [
    Guide("jmp", (), "params", "params", 1e-5, 1e-6),
    Guide("flax_dynamic_scale", (), "state.params", "state.params", 1e-5, 1e-6),
    Guide("torch_amp", ("torch",), _TORCH_PARAMS, "state.params", 3e-3, 2e-4, torch=True),
    Guide("fsdp2", ("torch",), _TORCH_PARAMS, "state.params", 3e-3, 1e-3, torch=True, processes=2),
    Guide("mpx", ("mixed_precision_for_JAX", "equinox"), *2 * (_EQUINOX_PARAMS,), 3e-3, 5e-4),
    Guide("keras", ("keras",), "state[0]", "state.params", 3e-3, 3e-4),
    Guide("torchao", ("torchao", "torch"), _TORCH_PARAMS, "state.params", 3e-3, 1e-3, torch=True),
    Guide("maxtext", (), "params", "state.params", 2e-3, 2e-2),
]
