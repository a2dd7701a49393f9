"""Globs mean what a plain matcher says, and none of them takes long to match."""

import time

import pytest
from hypothesis import example, given, strategies as st

from jaxmp import PolicyRules
from jaxmp._policies.patterns import hides_all_of, matches


def plain(pattern: str, path: str) -> bool:
    """A glob by its definition: every choice is tried, for names and for characters."""

    def names_match(globs: list[str], names: list[str]) -> bool:
        if not globs:
            return not names
        if globs[0] == "**":
            return any(names_match(globs[1:], names[i:]) for i in range(len(names) + 1))
        return (
            bool(names) and name_matches(globs[0], names[0]) and names_match(globs[1:], names[1:])
        )

    def name_matches(glob: str, name: str) -> bool:
        if not glob:
            return not name
        if glob[0] == "*":
            return any(name_matches(glob[1:], name[i:]) for i in range(len(name) + 1))
        if glob[0] == "[":
            chars, rest = glob[1 : glob.index("]")], glob[glob.index("]") + 1 :]
            chosen = chars.removeprefix("!")
            if chosen[1:2] == "-":
                chosen = "".join(map(chr, range(ord(chosen[0]), ord(chosen[2]) + 1)))
            wanted = (name[:1] in chosen) is not chars.startswith("!")
            return bool(name) and wanted and name_matches(rest, name[1:])
        return bool(name) and glob[0] in ("?", name[0]) and name_matches(glob[1:], name[1:])

    globs = [] if pattern == "/" else pattern.removeprefix("/").split("/")
    anywhere = [] if pattern.startswith("/") else ["**"]
    return names_match([*anywhere, *globs], path.split("/") if path else [])


SETS = ["[ab]", "[!a]", "[b-c]", "[!a-b]"]
one_name = st.lists(st.sampled_from(["a", "b", ".", "*", "?", *SETS]), min_size=1, max_size=5)
names = one_name.map("".join).filter(lambda name: "**" not in name) | st.just("**")
globs = st.tuples(st.sampled_from(["", "/"]), st.lists(names, min_size=1, max_size=5)).map(
    lambda parts: parts[0] + "/".join(parts[1])
)
paths = st.lists(st.text("ab.c", min_size=1, max_size=4), max_size=5).map("/".join)


@given(globs | st.just("/"), paths)
@example("**/a/**/a/**", "a/b/a")
@example("*a*b", "aab")
@example("/**/a", "a")
@example("**", "")
def test_globs_are_what_they_say(pattern: str, path: str) -> None:
    assert matches(pattern, path, None) is plain(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("**/" * 8 + "x", "/".join("l" * 20)),
        ("**/" * 300 + "x", "/".join("l" * 300)),
        ("**/l/" * 100 + "x", "/".join("l" * 300)),
        ("*l" * 100 + "x", "l" * 300),
        ("**/" + "*l" * 20 + "x/**/x", "/".join(["l" * 30] * 30)),
        ("[!a]*" * 50 + "x", "l" * 300),
    ],
)
def test_no_glob_takes_long(pattern: str, path: str) -> None:
    """Eight `**` on twenty names took seconds, and twice as long with every further one."""
    rules = PolicyRules([(pattern, "float32")], "bfloat16")
    start = time.perf_counter()
    assert rules.decide(path).rule is None
    assert time.perf_counter() - start < 2
    assert rules.decide(f"{path}x" if "/" not in path else f"{path}/x").rule in (0, None)


@given(globs, globs, paths)
def test_what_hides_all_of_another_matches_all_that_it_does(
    earlier: str, later: str, path: str
) -> None:
    if hides_all_of(earlier, later) and plain(later, path):
        assert plain(earlier, path)
