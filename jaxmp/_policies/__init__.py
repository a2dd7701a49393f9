"""The dtypes that a model uses: policies, and rules that give its parts other policies.

A `Policy` is a value that flows through the whole package: as text, in rules, in signatures of
programs. It has no code for arrays but casts.

- `policy`: `Policy` and `get_policy`; read it first. A new preset is a row of `_PRESETS`.
- `recipe`: how products are multiplied in float8. A new recipe is a row of `_RECIPES`, a new
  format an entry of `_FLOAT8`.
- `patterns`: how rules find modules. A new kind is a case of `matches` and of `check_pattern`.
- `policy_rules`: `PolicyRules`, an ordered list of patterns and policies; config files.
- `presets`: families of modules by their names in public code; a new family is a `Family`.
"""
