"""Training needs neither Flax nor Equinox; what does says how to install them."""

import subprocess
import sys

import pytest

# Packages that cannot be found, as if they were not installed.
BLOCK = """
import sys

class Without:
    def __init__(self, finder, packages):
        self.finder, self.packages = finder, packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

def block(*packages):
    sys.meta_path = [Without(finder, packages) for finder in sys.meta_path]
"""
TRAIN = """
import jax, jax.numpy as jnp, optax
import jaxmp

def loss_fn(params, batch):
    with jax.named_scope("dense"):
        y = jnp.tanh(batch["x"] @ params["w"])
    return jnp.mean((y - batch["y"]) ** 2)

params = {"w": jnp.full((8, 2), 0.1)}
batch = {"x": jax.random.normal(jax.random.key(0), (16, 8)), "y": jnp.ones((16, 2))}
for policy in ("mixed_bfloat16", "mixed_float16"):
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy)
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jaxmp.make_train_step(loss_fn, policy, microbatches=2, recompute="auto")
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0], losses
    jaxmp.check_progress(state, metrics["loss"])
fast = jaxmp.autocast(loss_fn, jaxmp.PolicyRules(default="mixed_bfloat16"))
assert str(jaxmp.audit(fast, params, batch))
jaxmp.diagnostics.find_overflow(loss_fn, params, batch)
jaxmp.diagnostics.sensitivity(loss_fn, params, batch)
from jaxmp._tools.command.main import main
assert main(["plan", "10M", "--policy", "bfloat16"]) == 0
assert main(["doctor"]) in (0, 1)  # 1 where it finds a fault, as of the compiler for CPUs
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("prepare", ["block('flax', 'equinox')", ""], ids=["blocked", "installed"])
def test_training_imports_no_library_of_models(prepare: str) -> None:
    code = f"{BLOCK}\n{prepare}\n{TRAIN}\nassert not {{'flax', 'equinox'}} & set(sys.modules)"
    assert "jaxmp" in run(code)


FLAX_AND_STATES = """
import dataclasses, sys
import jax, jax.numpy as jnp, optax
{before}
import jaxmp
assert ("flax" in sys.modules) == bool({before!r})
{between}

@dataclasses.dataclass(frozen=True, kw_only=True)
class WithAverage(jaxmp.TrainState):
    average: object

@dataclasses.dataclass(frozen=True, kw_only=True)
class Further(WithAverage):
    pass

tx = jaxmp.mixed_precision(optax.adam(0.1), "bfloat16")
w = {{"w": jnp.ones(3)}}
states = [jaxmp.TrainState.create(params=w, tx=tx)]
states += [cls.create(params=w, tx=tx, average=w) for cls in (WithAverage, Further)]
{after}
import flax.serialization as fs
for state in states:
    state = jax.jit(lambda s: s.apply_gradients({{"w": jnp.ones(3)}}))(state)
    assert set(fs.to_state_dict(state)) >= {{"step", "params", "opt_state"}}
    restored = fs.from_bytes(jax.tree.map(jnp.zeros_like, state), fs.to_bytes(state))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), restored, state))
    assert int(restored.step) == 1
print(sum(len(fs.to_bytes([state, state.opt_state])) for state in states))
"""


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        ("before", "from flax import nnx"),
        ("between", "import flax.serialization"),
        ("after", "import flax.serialization"),
        ("after", "from flax import nnx"),
    ],
)
def test_flax_learns_of_states_whenever_it_is_imported(place: str, statement: str) -> None:
    """Before jaxmp, before the first state, or after it; subclasses of states too."""
    places = {name: statement * (name == place) for name in ("before", "between", "after")}
    assert int(run(FLAX_AND_STATES.format(**places))) > 1000


def test_a_class_registered_with_flax_by_its_author_stays_theirs() -> None:
    code = """
import flax.struct, flax.serialization
import jaxmp

@flax.struct.dataclass(kw_only=True)
class Mine(jaxmp.TrainState):
    average: object = None

print(flax.serialization.is_serializable(Mine))
"""
    assert run(code).split()[0] == "True"


@pytest.mark.parametrize(
    ("statement", "extra", "named"),
    [
        ("import jaxmp.linen", "flax", "jaxmp.linen and jaxmp.nnx need flax"),
        ("from jaxmp import nnx", "flax", "jaxmp.linen and jaxmp.nnx need flax"),
        ("import jaxmp; jaxmp.nnx.value_and_grad", "flax", "jaxmp.linen and jaxmp.nnx need flax"),
        ("import jaxmp; jaxmp.equinox.apply_policy", "equinox", "jaxmp.equinox needs equinox"),
    ],
)
def test_errors_name_the_extra(statement: str, extra: str, named: str) -> None:
    code = f"""{BLOCK}
block('flax', 'equinox')
try:
    {statement}
except ModuleNotFoundError as error:
    print(error.name, error, sep=chr(10))
"""
    said = f'{named}, which is not installed: pip install "jaxmp[{extra}]"'
    assert run(code).splitlines() == [extra, said]


def test_dir_shows_what_can_be_imported() -> None:
    code = f"{BLOCK}\nblock('flax')\nimport jaxmp, inspect; print(*dict(inspect.getmembers(jaxmp)))"
    names = run(code).split()
    assert {"equinox", "autocast"} <= set(names)
    assert not {"linen", "nnx"} & set(names)


def test_a_fault_inside_the_library_is_its_own() -> None:
    code = f"""{BLOCK}
block('msgpack')  # which flax imports
try:
    import jaxmp.linen
except ModuleNotFoundError as error:
    print(error.name, "jaxmp" in str(error))
"""
    assert run(code).split() == ["msgpack", "False"]
