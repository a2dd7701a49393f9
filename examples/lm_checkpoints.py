"""Checkpoints of a run: the state, the result of each step, and the settings they depend on."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import jaxmp


class Checkpoints:
    """The checkpoints in a folder, each under the number of its steps.

    Orbax writes to a temporary folder and renames it when it is complete. So if a process is killed
    in the middle of a save, the checkpoint before it stays the latest. Each of several processes
    writes its own part, to a folder that all of them see.

    Args:
      folder: the folder with the checkpoints.
      recipe: the settings that the trained numbers depend on; a resumed run must share them.
    """

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        self.folder, self.recipe = folder, recipe
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(2),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
        )
        self.manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """The number of steps of the latest one; None if there is none."""
        return self.manager.latest_step()

    def save(self, steps: int, state: jaxmp.TrainState, history: dict[str, Any]) -> None:
        """Writes everything that later steps depend on, and the results of earlier ones."""
        record = {"recipe": self.recipe, "history": history}
        items = {"state": ocp.args.StandardSave(state), "record": ocp.args.JsonSave(record)}
        self.manager.save(steps, args=ocp.args.Composite(**items))

    def restore(self, like: Any) -> tuple[jaxmp.TrainState, dict[str, Any]]:
        """The latest state and history.

        Args:
          like: a state, or its shapes with shardings, which the restored state gets.

        Raises:
          SystemExit: if the checkpoint was made with another recipe.
        """
        # The settings first: a state of another size would fail with a less useful message.
        record = self._read(record=ocp.args.JsonRestore()).record
        then = record["recipe"]
        if changed := [key for key, value in self.recipe.items() if then.get(key) != value]:
            raise SystemExit(
                f"cannot resume {self.folder}: it was made with other settings: "
                + ", ".join(f"{key} {then.get(key)}, not {self.recipe[key]}" for key in changed)
            )
        return self._read(state=ocp.args.StandardRestore(like)).state, record["history"]

    def _read(self, **items: Any) -> Any:
        return self.manager.restore(self.latest, args=ocp.args.Composite(**items))
