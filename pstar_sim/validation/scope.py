"""Which published rows are compared, by scope.toml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from pstar_sim.errors import CatalogError
from pstar_sim.python310 import TOMLDecodeError, toml_loads
from pstar_sim.validation.rows import PublishedRow

USES = ("fitted", "to fit", "tested", "no policy", "out")
_PATTERNS = ("file", "system", "hardware", "params", "batch", "metric", "source")


@dataclass(frozen=True, kw_only=True)
class ScopeRule:
    """Decides on rows.

    patterns: column -> shell patterns, one of which has to match, anything for a missing column.
    looked_at: a choice of ours that these rows made though tested.
    as_found: CPU steps as users find them: threads, binding and pinning left by the launcher.
    inferred: that choice has no source but these rows' errors, which then count in no bar.
    """

    name: str
    patterns: Mapping[str, tuple[str, ...]]
    use: str
    why: str
    looked_at: str = ""
    inferred: bool = False
    as_found: bool = False

    def matches(self, row: PublishedRow) -> bool:
        return all(
            any(fnmatchcase(getattr(row, column), p) for p in patterns) for column, patterns in self.patterns.items()
        )


def read_scope(file: str, text: str) -> tuple[ScopeRule, ...]:
    """In order. Raises CatalogError for a rule without name, use or reason, with an unknown key, or `inferred` without
    looked_at."""
    try:
        raw_rules = toml_loads(text).get("rule", [])
    except TOMLDecodeError as error:
        raise CatalogError(f"{file}: {error}") from error
    rules: list[ScopeRule] = []
    for raw in raw_rules:
        name = raw.get("name")
        if unknown := set(raw) - {"name", "use", "why", "looked_at", "inferred", "as_found", *_PATTERNS}:
            raise CatalogError(f"{file}, rule {name!r}: unknown key {sorted(unknown)[0]!r}")
        if not name or not raw.get("why") or raw.get("use") not in USES:
            raise CatalogError(f"{file}, rule {name!r}: needs a name, a use ({', '.join(USES)}) and a reason (why)")
        inferred, looked_at = raw.get("inferred", False), raw.get("looked_at", "")
        as_found = raw.get("as_found", False)
        if not isinstance(as_found, bool):
            raise CatalogError(f"{file}, rule {name!r}: as_found is true or false")
        if not isinstance(inferred, bool) or (inferred and not looked_at):
            raise CatalogError(f"{file}, rule {name!r}: inferred is true or false, and true only beside looked_at")
        if name in {r.name for r in rules}:
            raise CatalogError(f"{file}: two rules are named {name!r}")
        patterns = {key: tuple(raw[key]) for key in _PATTERNS if key in raw}
        rules.append(
            ScopeRule(
                name=name,
                patterns=patterns,
                use=raw["use"],
                why=raw["why"],
                looked_at=looked_at,
                inferred=inferred,
                as_found=as_found,
            )
        )
    return tuple(rules)


def rule_of(row: PublishedRow, rules: Iterable[ScopeRule]) -> ScopeRule:
    """The first that matches; raises CatalogError without one."""
    for rule in rules:
        if rule.matches(row):
            return rule
    raise CatalogError(f"{row.where} ({row.system}, {row.hardware}, {row.metric}): no rule of scope")


@cache
def published_scope() -> tuple[ScopeRule, ...]:
    text = (files("pstar_sim.validation") / "data" / "scope.toml").read_text(encoding="utf-8")
    return read_scope("scope.toml", text)
