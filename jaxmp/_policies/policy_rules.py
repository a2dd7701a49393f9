"""Policy rules: one ordered list that says which part of a model runs in which precision."""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jmp

from jaxmp._numerics.dtypes import suggestion
from jaxmp._numerics.user_warnings import warn
from jaxmp._policies.patterns import Pattern, check_pattern, hides_all_of, matches, pattern_text
from jaxmp._policies.policy import Policy, get_policy, short_name


class Decision(NamedTuple):
    """The decision of the rules about one module.

    Attributes:
      policy: the policy of the module, or None to leave it as its author made it.
      rule: the index of the rule that decided, or None for the default.
    """

    policy: Policy | None
    rule: int | None


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class PolicyRules:
    """Rules for the precision of each part of a model, said once for the whole model.

    An ordered list of `(pattern, policy)`: the first pattern that matches a module decides, and the
    default decides if no pattern matches. A rule that an earlier rule hides completely, by the same
    pattern or by one that matches everything, gives a warning. Rules are a value: immutable,
    hashable, comparable. A pattern is one of

    * a glob over the path of a module, its names from the root joined by `/`. It is matched from
      the right, so that rules still hold when the model becomes a part of another:

      ================ ==================================== ================
      glob             matches                              does not match
      ================ ==================================== ================
      `head`           `head`, `decoder/head`               `head/dense`
      `*norm*`         `norm`, `encoder/layer_0/norm1`      `norm/dense`
      `*/norm*`        `encoder/layer_0/norm1`              `norm`
      `decoder/**/mlp` `decoder/mlp`, `decoder/0/block/mlp` `decoder/mlp/in`
      `decoder/**`     `decoder` and all that is in it      `encoder`
      `/head`          `head` at the root of the model only `decoder/head`
      `/`              the model itself
      ================ ==================================== ================

      `*` and `?` stand for characters within a name, `[ab]` and `[!ab]` for one of a set, `**`
      for any number of names, also none. A module does not hand its policy down to its children:
      `decoder` means that one module, `decoder/**` all of it. (Layers that Flax itself is made
      of, such as the projections inside its attention, follow the layer that they are part of.)
    * `"type:Glob"`, over the names of the module's class and its base classes, as in
      `"type:*Norm"`; or the class itself.
    * a compiled regular expression, or `"re:..."`, that matches the whole path.
    * a predicate `(path, module) -> bool`.

    Args:
      rules: pairs of pattern and policy, or a dictionary. Policies may be given by name. None as
        a policy leaves a module as its author made it.
      default: the policy where no rule matches; None leaves such modules alone.

    Attributes:
      rules: the pairs, as a tuple.
      default: the default policy, or None.

    Raises:
      ValueError: for a pattern that is not a valid glob or expression, or an unknown policy.
      TypeError: for a pattern or policy of another type.

    >>> rules = PolicyRules([("*norm*", "float32")], default="mixed_bfloat16")
    >>> rules.resolve("encoder/layer_0/norm1").compute_dtype.name
    'float32'
    >>> print(rules)
    *norm*     float32
    (default)  mixed_bfloat16
    """

    rules: tuple[tuple[Pattern, Policy | None], ...]
    default: Policy | None

    def __init__(
        self,
        rules: Mapping[Any, Any] | Iterable[Any] = (),
        default: str | jmp.Policy | None = None,
    ) -> None:
        items = rules.items() if isinstance(rules, Mapping) else _check_pairs(rules)
        pairs = tuple((check_pattern(pattern), _policy(policy)) for pattern, policy in items)
        object.__setattr__(self, "rules", pairs)
        object.__setattr__(self, "default", _policy(default))
        patterns = [pattern for pattern, _ in pairs]
        for i, pattern in enumerate(patterns):
            # Rules that can never decide, whatever the model. Families of modules may be missing.
            hides = [earlier for earlier in patterns[:i] if hides_all_of(earlier, pattern)]
            if hides and not getattr(pattern, "optional", False):
                warn(
                    f"the rule for {pattern_text(pattern)!r} can never hold: the one before it for "
                    f"{pattern_text(hides[0])!r} decides all that it matches. The first rule that "
                    "matches decides: put the rule for fewer modules first, or remove one of them"
                )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "PolicyRules":
        """Makes rules from the contents of a config file.

        Args:
          config: `{"default": policy, "rules": {pattern: policy, ...}}`, either of them
            optional. `rules` may also be a list of pairs, or of `{"pattern": ..., "policy":
            ...}`. The policy `"none"` leaves modules alone.

        Returns:
          The rules.

        Raises:
          ValueError: for another key, or as `PolicyRules` itself does.
          TypeError: if something is of another type.

        >>> PolicyRules.from_dict({"rules": {"head": "float32"}, "default": "mixed_float16"})
        PolicyRules([('head', 'float32')], default='mixed_float16')
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"a config must be a dictionary, got {type(config).__name__}")
        for key in config:
            if key not in ("rules", "default"):
                hint = suggestion(str(key), ["rules", "default"])
                raise ValueError(
                    f"unknown key {key!r} in a config of rules.{hint} Valid keys: rules, default. "
                    "Patterns belong under 'rules'"
                )
        rules, default = config.get("rules", ()), config.get("default")
        # Checked here, so that an error names the key of the file and not an argument.
        if default is not None and not isinstance(default, (str, jmp.Policy)):
            raise TypeError(f"'default' must be a policy or its name, got {default!r}")
        if not isinstance(rules, (str, Mapping, list, tuple)):
            raise TypeError(
                "'rules' must be a table {pattern: policy} or a list of pairs, got "
                f"{'null' if rules is None else repr(rules)}. Leave the key out for a default alone"
            )
        # An array of tables in TOML, [[rules]], makes a list of dictionaries.
        if not isinstance(rules, (str, Mapping)):
            rules = [
                (_entry(rule, "pattern"), _entry(rule, "policy"))
                if isinstance(rule, Mapping)
                else rule
                for rule in rules
            ]
        return cls(rules, default)

    @classmethod
    def from_toml(cls, text: str) -> "PolicyRules":
        """Makes rules from the text of a TOML file; see `from_dict` for the keys.

        Args:
          text: TOML.

        Returns:
          The rules, in the order of the text.

        Raises:
          ValueError: if the text is not TOML, or as `from_dict` does.

        >>> text = '''
        ... default = "mixed_bfloat16"
        ... [rules]
        ... "*norm*" = "float32"
        ... '''
        >>> PolicyRules.from_toml(text)
        PolicyRules([('*norm*', 'float32')], default='mixed_bfloat16')
        """
        import tomllib  # Only configs in TOML need it.

        return cls.from_dict(tomllib.loads(text))

    @classmethod
    def from_json(cls, text: str) -> "PolicyRules":
        """Makes rules from JSON text; see `from_dict` for the keys.

        Args:
          text: JSON, an object.

        Returns:
          The rules, in the order of the text.

        Raises:
          ValueError: if the text is not JSON, has a key or pattern twice, or as `from_dict` does.

        >>> PolicyRules.from_json('{"rules": {"re:.*head": "float32"}}').default is None
        True
        """
        return cls.from_dict(json.loads(text, object_pairs_hook=_dict_of_unique))

    def resolve(self, path: str, module: Any = None) -> Policy | None:
        """Returns the policy of the module at a path.

        Args:
          path: names from the root of the model joined by `/`; `""` is the model itself.
          module: the module, for rules about types and predicates; without it no type matches.

        Returns:
          The policy, or None if the module is to be left alone.

        >>> PolicyRules([("head", "float32")]).resolve("head/dense") is None
        True
        """
        return self.decide(path, module).policy

    def decide(self, path: str, module: Any = None) -> Decision:
        """Resolves a path like `resolve`, but also says which rule decided.

        Args:
          path: names joined by `/`.
          module: the module, if at hand.

        Returns:
          The policy, and the index of the rule.

        >>> PolicyRules([("head", "bf16"), ("*", "f32")]).decide("a/b").rule
        1
        """
        path = path.strip("/")
        for index, (pattern, policy) in enumerate(self.rules):
            if matches(pattern, path, module):
                return Decision(policy, index)
        return Decision(self.default, None)

    def unused(self, paths: Iterable[str] | Mapping[str, Any]) -> list[Pattern]:
        """Returns the patterns that decide nothing: misspelt, or hidden behind an earlier pattern.

        Args:
          paths: the paths of all modules of a model, or a dictionary from path to module.

        Returns:
          The patterns, in order.

        >>> rules = PolicyRules([("*norm*", "f32"), ("haed", "f32"), ("ln_norm", "bf16")])
        >>> rules.unused(["ln_norm", "head"])
        ['haed', 'ln_norm']
        """
        used = {decision.rule for _, decision in self._decisions(paths)}
        return [pattern for i, (pattern, _) in enumerate(self.rules) if i not in used]

    def table(self, paths: Iterable[str] | Mapping[str, Any]) -> str:
        """Returns a table, to print, of what the rules mean for a model.

        Args:
          paths: the paths of all modules of a model, or a dictionary from path to module.

        Returns:
          A line for each path: the path, its policy, and the pattern that decided.

        >>> print(PolicyRules({"*norm*": "float32"}, default="bf16").table(["norm", "head"]))
        norm  float32   *norm*
        head  bfloat16  (default)
        """
        texts = {i: pattern_text(pattern) for i, (pattern, _) in enumerate(self.rules)}
        return _columns(
            (path or "(root)", _policy_text(policy), "(default)" if rule is None else texts[rule])
            for path, (policy, rule) in self._decisions(paths)
        )

    def warn_unused(
        self,
        paths: Mapping[str, Any],
        *,
        strict: bool,
        used: Collection[int | None] | None = None,
    ) -> None:
        """Warns of rules that decide nothing in a model, or raises if `strict`.

        Args:
          paths: a dictionary from path to module.
          strict: raise instead of warning.
          used: the indices of the rules that decided something, if known.

        Raises:
          ValueError: if `strict` and a rule decides nothing.

        >>> PolicyRules({"head": "f32"}).warn_unused({"head": None}, strict=True)
        """
        # Linen's modules exist only while they run: it notes the rules that decided.
        if used is None:
            unused = self.unused(paths)
        else:
            unused = [pattern for i, (pattern, _) in enumerate(self.rules) if i not in used]
        # A ready-made family, such as routers, may be missing from a model.
        unused = [pattern for pattern in unused if not getattr(pattern, "optional", False)]
        if not unused:
            return
        texts = []
        for pattern in unused:
            hidden = [path for path, module in paths.items() if matches(pattern, path, module)]
            reason = f" (earlier rules decide {hidden[0]!r} and the like)" if hidden else ""
            texts.append(f"{pattern_text(pattern)!r}{reason}")
        names = [repr(path) for path in paths if path][:8]
        more = ", ..." if len(paths) > 9 else ""
        is_module = any(module is not None for module in paths.values())
        modules = "It is one module, '/'" if is_module else "Nothing in it has a name"
        if names:
            modules = f"Its modules are {', '.join(names)}{more}"
        message = (
            f"rules that match nothing in this model: {', '.join(texts)}. {modules}. Correct the "
            "pattern, or remove the rule"
        )
        if strict:
            raise ValueError(message)
        warn(message)

    def _decisions(self, paths: Iterable[str] | Mapping[str, Any]) -> list[tuple[str, Decision]]:
        modules = paths if isinstance(paths, Mapping) else dict.fromkeys(paths)
        return [(path, self.decide(path, module)) for path, module in modules.items()]

    def __str__(self) -> str:
        lines = [(pattern_text(pattern), _policy_text(policy)) for pattern, policy in self.rules]
        return _columns([*lines, ("(default)", _policy_text(self.default))])

    def __repr__(self) -> str:
        pairs = ", ".join(f"({p!r}, {_name_of(policy)!r})" for p, policy in self.rules)
        return f"PolicyRules([{pairs}], default={_name_of(self.default)!r})"


def _check_pairs(rules: Any) -> list[tuple[Any, Any]]:
    # A name of a policy is iterable too: its letters would be rules.
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise TypeError(
            "rules must be (pattern, policy) pairs or a dictionary, got "
            f"{rules!r}. For one policy everywhere, write PolicyRules(default={rules!r})"
        )
    pairs = list(rules)
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"a rule must be a pair (pattern, policy), got {pair!r}")
    return [(pattern, policy) for pattern, policy in pairs]


def _dict_of_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes the dictionary of a JSON object."""
    # json itself would keep the last of two equal keys, and one of two rules would be lost.
    config: dict[str, Any] = {}
    for key, value in pairs:
        if key in config:
            raise ValueError(
                f"{key!r} is there twice, with {config[key]!r} and {value!r}: only one of them can "
                "hold. Remove the other"
            )
        config[key] = value
    return config


def _policy(policy: Any) -> Policy | None:
    if policy is None or policy == "none":  # TOML has no null
        return None
    return get_policy(policy)


def _entry(rule: Mapping[str, Any], key: str) -> Any:
    if key not in rule or len(rule) != 2:
        raise ValueError(f"a rule must have the keys 'pattern' and 'policy', got {dict(rule)}")
    return rule[key]


def _name_of(policy: Policy | None) -> str | None:
    return None if policy is None else short_name(policy)


def _policy_text(policy: Policy | None) -> str:
    return "(left alone)" if policy is None else short_name(policy)


def _columns(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
