"""A lock file sees each change of a dtype, and no refactoring that changes none."""

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from benchmarks.stacked_models import GPT, LSTM, Gemma, Model, MoE, ResNet, Sizes, ViT
from jaxmp._program.op_classes import CASTS, PASSED_ON
from jaxmp._tools.command.main import main
from jaxmp._tools.inspect.api import AuditError, AuditReport, audit
from jaxmp._tools.inspect.lines import direction, module_path, scopes_of
from tests.support.audit_lines import array
from tests.support.planted import float_sites, planted, traced
from tests.support.refactorings import CHANGES, REFACTORINGS, Change, built, gradient, train_step

pytestmark = pytest.mark.jax
BF16, F32 = jnp.bfloat16, jnp.float32
SIZES = Sizes(layers=2, width=32, batch=4, length=16, heads=4, classes=64)
Audit = Callable[..., AuditReport]


def differences(before: AuditReport, after: AuditReport, folder: pathlib.Path) -> list[str]:
    """What the check says of a changed program, line by line; nothing if it passes."""
    path = folder / "numerics.json"
    before.write_lock(path)
    return failure(after, path)


def failure(report: AuditReport, path: pathlib.Path) -> list[str]:
    try:
        assert report.check(lock=path) is report
    except AuditError as error:
        return str(error).splitlines()[2:]
    return []


def layers(dtypes: list[Any], name: str = "layer", model: str = "net") -> AuditReport:
    def run(x: Any) -> Any:
        with jax.named_scope(model):
            for i, dtype in enumerate(dtypes):
                with jax.named_scope(f"{name}_{i}"):
                    x = (x.astype(dtype) @ x.astype(dtype)).astype(F32)  # product
        return x

    return audit(run, array(8, 8))


def test_a_change_is_said_with_its_module_and_line(tmp_path: pathlib.Path) -> None:
    found = differences(layers([BF16, BF16]), layers([BF16, F32]), tmp_path)
    assert re.sub(r":\d+ ", ": ", found[0]) == (
        "  net/layer_1, products:  dot_general bfloat16 x bfloat16 -> bfloat16: 1 -> 0;  "
        "dot_general float32 (bfloat16) x float32 (bfloat16) -> float32: 0 -> 1  at test_lock.py: "
        "(layers.run)"
    )
    # The result of the program is not rounded any more.
    assert found[1:] == ["  (program), results:  float32: 0 -> 1;  float32 (bfloat16): 1 -> 0"]


def test_the_message_says_how_to_write_the_file_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "numerics.json"
    layers([BF16]).write_lock(path)
    with pytest.raises(AuditError) as caught:
        layers([F32]).check(lock=path)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "the audit failed."
    assert second == (
        f"the numerics changed, compared with {path} (if this is meant, write it: "
        f"report.write_lock({str(path)!r}), or jaxmp audit PROGRAM --lock {path}):"
    )


def test_equal_layers_are_one_entry_and_one_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "numerics.json"
    layers([BF16] * 30).write_lock(path)
    lock = json.loads(path.read_text())
    assert sum(len(entry["modules"]) == 30 for entry in lock["numerics"]) == 1
    found = failure(layers([F32] * 30), path)
    assert len(found) <= 4
    assert any("(and 29 more modules)" in line for line in found)


def test_many_differences_are_cut_short(tmp_path: pathlib.Path) -> None:
    widths = [BF16, F32]

    def report(first: int) -> AuditReport:
        def run(x: Any) -> Any:
            for i in range(30):
                with jax.named_scope(f"layer_{i}"):
                    for _ in range(i + 1):
                        x = lax.dot(x, x, preferred_element_type=widths[first]).astype(BF16)
            return x

        return audit(run, array(8, 8, dtype=BF16))

    found = differences(report(0), report(1), tmp_path)
    assert len(found) == 21
    assert found[-1] == "  ... and 10 more"


def test_a_swap_between_modules_is_seen_and_a_renaming_is_none(tmp_path: pathlib.Path) -> None:
    found = differences(layers([BF16, F32]), layers([F32, BF16]), tmp_path)
    assert [line.partition(",")[0] for line in found][:2] == ["  net/layer_0", "  net/layer_1"]
    renamed = layers([BF16, F32], "block", "Model")
    assert differences(layers([BF16, F32]), renamed, tmp_path) == []
    # A change in a renamed model is shown as a change.
    (line,) = differences(layers([F32, F32]), layers([F32, BF16], model="Model"), tmp_path)[:1]
    assert line.startswith("  Model/layer_1, products")


def test_a_swap_inside_a_module_is_seen_by_what_reads(tmp_path: pathlib.Path) -> None:
    """But not one between two equal operations, which are one row."""

    def report(first: Any, second: Any) -> AuditReport:
        def run(x: Any) -> Any:
            y = jnp.sin((x.astype(first) @ x.astype(first)).astype(F32))
            return jnp.cos((y.astype(second) @ y.astype(second)).astype(F32))

        return audit(run, array(8, 8))

    assert differences(report(BF16, F32), report(F32, BF16), tmp_path)

    def sums(first: Any, second: Any) -> AuditReport:
        def run(x: Any) -> Any:
            y = jnp.sum(jnp.sin(x), 0, dtype=first).astype(BF16)
            return y + jnp.sum(jnp.cos(x), 0, dtype=second).astype(BF16)

        return audit(run, array(8, 8, dtype=BF16))

    with jax.numpy_rank_promotion("allow"):
        assert differences(sums(BF16, F32), sums(F32, BF16), tmp_path) == []


@pytest.mark.parametrize(
    "rounded",
    [
        lambda x: x.astype(BF16).astype(F32),
        lambda x: lax.reduce_precision(x, 8, 7),
        lambda x: x.astype(jnp.float16).astype(F32),
        lambda x: x.astype(jnp.float8_e4m3fn).astype(F32),
        lambda x: (x * 2).astype(jnp.int8).astype(F32),
    ],
)
def test_a_value_that_is_rounded_and_widened_is_seen(rounded: Any, tmp_path: pathlib.Path) -> None:
    def report(change: Any) -> AuditReport:
        return audit(lambda x: jnp.sin(change(x).T), array(8, 4))

    assert differences(report(lambda x: x), report(rounded), tmp_path)
    assert differences(report(rounded), report(rounded), tmp_path) == []
    # In the result alone.
    assert differences(audit(lambda x: x, array(2)), audit(rounded, array(2)), tmp_path)


def test_a_value_that_is_rounded_has_the_dtype_that_rounds_it_most(tmp_path: pathlib.Path) -> None:
    """On the way from 8 bits to 32, bfloat16 rounds nothing."""

    def report(*dtypes: Any) -> AuditReport:
        return audit(
            lambda x: jnp.sin(functools.reduce(lax.convert_element_type, dtypes, x)), array(8)
        )

    short, long = (jnp.float8_e4m3fn, F32), (jnp.float8_e4m3fn, BF16, F32)
    assert differences(report(*short), report(*long), tmp_path) == []
    assert differences(report(BF16, F32), report(*long), tmp_path)


def test_a_sum_over_devices_is_seen(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def report(dtype: Any, compiled: bool = False) -> AuditReport:
        def body(x: Any) -> Any:
            return lax.psum(x.astype(dtype), "data").astype(F32)

        specs = {"in_specs": P("data"), "out_specs": P()}
        fn = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
        return audit(fn, array(8, 4), compiled=compiled)

    (line,) = differences(report(F32), report(BF16), tmp_path)[:1]
    assert "psum" in line or "results" in line
    found = differences(report(F32, True), report(BF16, True), tmp_path)
    assert any("compiled collectives:  all-reduce (add) bfloat16: 0 -> 1" in line for line in found)
    with pytest.raises(ValueError, match=r"was written with compiled=True, and this audit has"):
        report(F32).check(lock=tmp_path / "numerics.json")


def test_what_is_kept_is_seen(tmp_path: pathlib.Path) -> None:
    def report(dtype: Any) -> AuditReport:
        return audit(lambda x: jnp.sum(jnp.sin(x.astype(dtype)).astype(F32)), array(4))

    found = differences(report(F32), report(BF16), tmp_path)
    assert "  forward kept:  bfloat16: 0 -> 1;  float32: 1 -> 0" in found


def test_a_file_that_is_missing_or_no_lock_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no lock file '.*none.json'; write it: report\.wr"
    ):
        layers([F32]).check(lock=tmp_path / "none.json")
    for text in ("{", "[]", "{}", '{"numerics": [1]}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other.json' is no lock file; write it: report\.wr"):
            layers([F32]).check(lock=tmp_path / "other.json")


def test_other_versions_are_said_if_the_check_fails(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "numerics.json"
    layers([BF16]).write_lock(path)
    assert failure(layers([F32]), path)[-1].startswith("  ")
    path.write_text(path.read_text().replace(f'"jax": "{jax.__version__}"', '"jax": "0.4.1"'))
    assert failure(layers([BF16]), path) == []
    assert failure(layers([F32]), path)[-1] == (
        f"It was written by jaxmp {jaxmp.__version__} and jax 0.4.1, and this is jaxmp "
        f"{jaxmp.__version__} and jax {jax.__version__}, whose operations may differ. If nothing "
        "else changed, write it again."
    )


def test_hashes_of_version_0_1_are_ignored(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "numerics.json"
    layers([BF16, BF16]).write_lock(path)
    lock = json.loads(path.read_text())
    assert not [kind for entry in lock["numerics"] for kind in entry if kind.endswith("flow")]
    for entry in lock["numerics"]:
        entry |= {"flow": {"0123abcd": 1}, "backward flow": {"4567cdef": 1}}
    path.write_text(json.dumps(lock))
    assert failure(layers([BF16, BF16]), path) == []
    assert [line for line in failure(layers([BF16, F32]), path) if "products" in line]
    assert not [line for line in failure(layers([BF16, F32]), path) if "flow" in line]


def test_the_command_writes_and_checks(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    file, lock = tmp_path / "step.py", tmp_path / "numerics.json"
    text = (
        "import jax, jax.numpy as jnp\n"
        "def program():\n"
        "    x = jax.ShapeDtypeStruct((8, 8), 'float32')\n"
        "    return (lambda x: jnp.sin(x @ x)), (x,)\n"
    )
    file.write_text(text)
    assert main(["audit", f"{file}:program", "--check", f"lock={lock}"]) == 2
    assert "FileNotFoundError: there is no lock file" in capsys.readouterr().err
    assert main(["audit", f"{file}:program", "--lock", str(lock)]) == 0
    assert "Products: " in capsys.readouterr().out
    assert main(["audit", f"{file}:program", "--check", f"lock={lock}"]) == 0
    file.write_text(text.replace("jnp.sin(x", "jnp.sin(x.astype('bfloat16')"))
    with jax.numpy_dtype_promotion("standard"):
        assert main(["audit", f"{file}:program", "--check", f"lock={lock}"]) == 1
    assert "at step.py:4" in capsys.readouterr().err


AUDITS: dict[str, Audit] = {
    "gradient": lambda *args: gradient("mixed_bfloat16", *args),
    "float8": lambda *args: gradient("mixed_float8", *args),
    "step": train_step,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AUDITS)
@pytest.mark.usefixtures("standard_promotion")
def test_no_refactoring_is_an_alarm(name: str, tmp_path: pathlib.Path) -> None:
    before, run = AUDITS[name](), AUDITS[name]
    alarms = {
        change.name: found
        for change in REFACTORINGS
        if (found := differences(before, run(change, "elsewhere.py"), tmp_path))
    }
    print(f"{name}: {len(alarms)} alarms in {len(REFACTORINGS)} refactorings")
    assert len(REFACTORINGS) >= 24
    assert alarms == {}


def program_text(change: Change) -> str:
    loss, params, batch = built(change)
    run = jax.value_and_grad(jaxmp.autocast(loss, "mixed_bfloat16"))
    return str(jax.make_jaxpr(run)(params, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", AUDITS)
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore:gradients of .* pass through float16")
def test_changes_of_the_source_are_found(name: str, tmp_path: pathlib.Path) -> None:
    before, run, unseen = AUDITS[name](), AUDITS[name], []
    for change in CHANGES:
        found = differences(before, run(change), tmp_path)
        module = change.name.partition(":")[0]
        if not any(f"{module}, " in line for line in found):
            unseen.append(change)
    # autocast has the same program for three of them: it chooses these dtypes itself.
    same = [change.name for change in unseen if program_text(change) == program_text(Change(""))]
    print(f"{name}: {len(CHANGES) - len(unseen)} of {len(CHANGES) - len(same)} changes found")
    assert [change.name for change in unseen] == same
    assert len(same) <= 3


def test_another_master_is_seen(tmp_path: pathlib.Path) -> None:
    def report(master: Any) -> AuditReport:
        tx = jaxmp.mixed_precision(optax.sgd(0.1), "bfloat16", master=master)
        params = {"w": array(8, 8)}
        state = jax.eval_shape(lambda p: jaxmp.TrainState.create(params=p, tx=tx), params)
        step = jaxmp.make_train_step(lambda p, x: jnp.mean((x @ p["w"]).astype(F32)))
        return audit(step, state, array(4, 8, dtype=BF16))

    assert differences(report("float32"), report("remainder"), tmp_path)


def other_dtype(site: Any) -> Any:
    dtypes = {str(getattr(aval, "dtype", "")) for aval in [*site.in_avals, *site.out_avals]}
    return BF16 if "float32" in dtypes else F32


def exactly(run: Any, leaves: list[Any]) -> list[Any]:
    """Results with all roundings of the program: XLA drops some between fused operations."""
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})(*leaves)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float8"])
@pytest.mark.parametrize("kind", [GPT, Gemma, ViT, ResNet, LSTM, MoE])
def test_each_planted_dtype_is_found(
    kind: type[Model], policy: str, tmp_path: pathlib.Path
) -> None:
    """Every twelfth operation, one at a time, in another dtype between casts."""
    model = kind(SIZES)
    params, batch = model.params(), model.batch()
    closed = traced(jax.value_and_grad(jaxmp.autocast(model.loss, policy)), params, batch)
    before = audit(planted(closed), *closed.in_avals)
    leaves = jax.tree.leaves((params, batch))
    wanted: list[Any] | None = None
    found = same = moves = 0
    for site in float_sites(closed)[::12]:
        run = planted(closed, site.equation, other_dtype(site))
        lines = differences(before, audit(run, *closed.in_avals), tmp_path)
        if site.name in CASTS | PASSED_ON and not lines:
            # Rounded before or after a move, or twice: the numbers must be the same.
            wanted = wanted or exactly(planted(closed), leaves)
            for a, b in zip(wanted, exactly(run, leaves), strict=True):
                np.testing.assert_array_equal(a, b)
            same += 1
        else:
            path = "/".join(x for x in module_path(scopes_of(site)).split("/") if "->" not in x)
            place = " ".join(filter(None, [f"{path}," if path else "", direction(scopes_of(site))]))
            assert any(line.startswith(f"  {place}") for line in lines), (site.equation, lines)
            found += 1
            moves += site.name in CASTS | PASSED_ON
    print(f"{kind.__name__} {policy}: {found} found ({moves} moves), {same} that change nothing")
    assert found >= 8  # an LSTM has twelve of these operations, four of which move or cast
