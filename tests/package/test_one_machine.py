"""One mechanism answers a question. How a program runs is written once, and so are others.

A second loop that hands results from operation to operation is a second evaluator, and whoever
enters a new kind of equation has to find it.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.package.test_architecture import MODULES, source_of

# Where loops over operations give something to each result, and why.
HANDS_ON = {
    "_program.evaluate": "cells: this is the evaluator",
    "_program.facts": "facts, forward and backward: they need no arrays, and loops end by joining",
    "_program.program": "numbers: reads jaxprs",
    "_gradient_release.values": "stacks that a later loop reads, backward",
    "_autocast.look_ahead": "readings, backward: a plan is made before it runs",
    "_autocast.reading": "casts that JAX adds behind sums of 16 bits: before anything is planned",
    "_recompute.storage": "costs: what is kept is decided by what comes before and behind",
    "_program.parts": "places of values: the text by which equal parts are known",
    "_recompute.pieces": "the values that exist when a piece runs",
    "_recompute.invariants": "values that no turn changes, and then what dear ones need, backward",
}
# Other questions, the calls that answer them, and the modules that may make these. Weights are
# followed twice: autocast asks what decides a dtype, the reduction where a sum over the batch
# begins, and the answers differ.
ANSWERS = {
    "makes classes": ({"types.new_class", "type of three"}, {"_modules.marks"}),
    "sets dtypes of layers": (
        {"layer_dtype", "takes_float_dtype"},
        {
            "_flax.linen_layers",
            "_flax.module_checks",
            "_flax.nnx_modules",
            "_flax.nnx_policy",
        },
    ),
    "follows weights of autocast": (
        {"is_weight", "_is_weight"},
        {"_autocast.layers", "_autocast.op_plans", "_autocast.planners"},
    ),
    "follows weights of the reduction": (
        {"origin_of", "like_param"},
        {
            "_float32_reduction.custom_derivatives",
            "_float32_reduction.reductions",
            "_float32_reduction.values",
            "_float32_reduction.weights",
        },
    ),
}
# What JAX calls the operands and programs of control flow, and the files that know it.
KNOWS_CONTROL_FLOW = {"_program.wiring", "_program.compat", "_program.op_classes"}
OF_CONTROL_FLOW = {"scan", "while", "cond", "cond_nconsts", "body_nconsts", "num_carry", "ft_in"}
# The same words with another meaning.
OTHERS = {
    "_tools.hlo.collectives": {"while"},  # an opcode of XLA
    "_tools.hlo.dataflow": {"while"},
    "_tools.inspect.checks": {"while"},  # the name of a row of a report
    "_training.skipping": {"cond"},  # a way to skip a step
}
_LISTS = {"ops", "eqns", "sites", "op_plans"}
_RESULTS = {"outputs", "outvars"}


def _attributes(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def loops_that_hand_on(source: str) -> Iterator[ast.For]:
    """Loops over the operations of a program that store something for each of their results."""
    for loop in ast.walk(ast.parse(source)):
        if not isinstance(loop, ast.For) or not _attributes(loop.iter) & _LISTS:
            continue
        inside = [each for statement in loop.body for each in ast.walk(statement)]
        updates = [
            each
            for each in inside
            if isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "update"
        ]
        stores = [each for each in inside if isinstance(each, ast.Assign | ast.AugAssign | ast.For)]
        if any(_attributes(each) & _RESULTS for each in (*updates, *stores)):
            yield loop


def words_of_control_flow(source: str) -> set[str]:
    strings = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Constant))
    return {each.value for each in strings if isinstance(each.value, str)} & OF_CONTROL_FLOW


def classes_with(source: str, field: str) -> set[str]:
    """Classes with an annotated field of this name: forms of a program hold equations."""
    return {
        each.name
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.ClassDef)
        for line in each.body
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == field
    }


def test_one_loop_evaluates() -> None:
    assert {name for name in MODULES if list(loops_that_hand_on(source_of(name)))} == set(HANDS_ON)
    assert len(list(loops_that_hand_on(source_of("_program.evaluate")))) == 1


@pytest.mark.parametrize(
    "source",
    [
        """
for equation in compat.open_jaxpr(jaxpr).eqns:
    with compat.where(equation):
        made = rule(equation, [read(atom) for atom in equation.invars])
    env.update(zip(equation.outvars, made, strict=True))
""",
        """
for op_plan in plan.op_plans:
    made = run_op_plan(op_plan, values)
    for number, value in zip(op_plan.op.outputs, made, strict=True):
        values.known[number] = value
""",
    ],
)
def test_the_check_sees_an_evaluator(source: str) -> None:
    assert len(list(loops_that_hand_on(source))) == 1


def test_the_check_lets_other_loops_pass() -> None:
    assert not list(loops_that_hand_on("for op in program.ops:\n    names.add(op.name)"))


def test_few_files_know_control_flow() -> None:
    knowing = {name: words_of_control_flow(source_of(name)) for name in MODULES}
    knowing = {name: words - OTHERS.get(name, set()) for name, words in knowing.items()}
    assert {name for name, words in knowing.items() if words} <= KNOWS_CONTROL_FLOW
    assert knowing["_program.wiring"] >= {"scan", "while", "cond"}  # positive control


def test_one_form_of_a_program() -> None:
    """`Op` and what is made of it; a kernel holds an equation to put into a program."""
    holding = {name: classes_with(source_of(name), "equation") for name in MODULES}
    assert {name: found for name, found in holding.items() if found} == {
        "_program.program": {"Op"},
        "_autocast.kernels": {"_Kernel"},
    }
    assert classes_with("class Site:\n    equation: Any", "equation") == {"Site"}


def calls_in(source: str) -> set[str]:
    """The names of functions that a source calls; `type` only where it makes a class."""
    calls = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
    names = {ast.unparse(each.func) for each in calls if ast.unparse(each.func) != "type"}
    makes = any(ast.unparse(each.func) == "type" and len(each.args) == 3 for each in calls)
    return names | ({"type of three"} if makes else set())


@pytest.mark.parametrize("question", ANSWERS)
def test_one_mechanism_answers_a_question(question: str) -> None:
    calls, modules = ANSWERS[question]
    assert {name for name in MODULES if calls_in(source_of(name)) & calls} == modules


def test_the_check_sees_a_second_factory() -> None:
    assert calls_in("twin = type(cls.__name__, (cls,), {})") & ANSWERS["makes classes"][0]
    assert not calls_in("cls = type(module)") & ANSWERS["makes classes"][0]
