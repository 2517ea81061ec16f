"""rollouts grep, stats, export: samples looked up by their columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import UserError, suggestion
from flows.commands.answer import Answer, finite
from flows.commands.named_run import named_run
from flows.commands.tables import counted, number, print_table, shorten, size
from storage.locations import Location
from storage.own_files import refuse_own_files
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.run_needs import ROLLOUTS
from storage.samples import (
    DERIVED,
    TOKEN_DIFFERENCES,
    Found,
    Query,
    chosen_iterations,
    known_columns,
    search,
    stored_columns,
    unknown_column,
)
from storage.where import compile_pattern, parse_where

if TYPE_CHECKING:
    from re import Pattern

    from rich.console import Console

    from storage.sample_stats import Group, Key

CONTEXT = 40
SHOWN = ("reward", "prompt_id", "length")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What `--iterations` and `--where` say of a run."""

    run: RunDirectory
    iterations: list[int]
    where: str | None

    @classmethod
    def of(cls, name_or_path: str, runs: Location | str, *, iterations: str | None, where: str | None) -> Selection:
        if where is not None:
            parse_where(where)  # a mistake is told before anything is read
        run = named_run(name_or_path, runs, ROLLOUTS)
        return cls(run=run, iterations=chosen_iterations(iterations, RolloutStore(run.rollouts).names()), where=where)

    def search(self, columns: list[str], *, optional: Sequence[str] = ()) -> Iterator[Found]:
        condition = parse_where(self.where) if self.where else None
        query = Query(iterations=self.iterations, where=condition, columns=columns, optional=optional)
        return search(RolloutStore(self.run.rollouts), query)

    def known(self) -> dict[str, str]:
        """Columns of the first chosen iteration that has rows, with their kinds."""
        store = RolloutStore(self.run.rollouts)
        return next((known for i in self.iterations if (known := known_columns(store, i))), {})


def grep(selection: Selection, pattern: str, *, column: str, ignore_case: bool, limit: int, count: bool) -> Answer:
    """Samples whose text column has the pattern, in the order of iterations and rows."""
    compiled = compile_pattern(pattern, "PATTERN", ignore_case=ignore_case)
    known = selection.known()
    if known and known.get(column) != "sample":
        raise UserError(f"--in {column}: not a text column; {suggestion(column, _samples(known))}")
    extra = [name for name in SHOWN if name in known]
    matches: list[dict[str, Any]] = []
    total = 0
    for found in selection.search([column, *extra]):
        texts = found.samples.sample(column)
        if texts.dtype != object:
            raise UserError(f"--in {column}: holds numbers, not text; --where compares them")
        for row in found.rows.tolist():
            match = compiled.search(texts[row])
            if match is None:
                continue
            total += 1
            if not count and (limit == 0 or len(matches) < limit):
                matches.append(_match(found, row, column, match.span(), extra))
    document = {"run": str(selection.run.path), "matches": total, "shown": len(matches), "samples": matches}
    return Answer(
        document=finite(document),
        show=lambda console: _show_matches(console, matches, total, compiled),
        exit_code=0,
    )


def _samples(known: dict[str, str]) -> list[str]:
    return [name for name, kind in known.items() if kind == "sample" and name not in DERIVED]


def _match(found: Found, row: int, column: str, span: tuple[int, int], extra: list[str]) -> dict[str, Any]:
    text = found.samples.sample(column)[row]
    values = {name: found.samples.sample(name)[row].item() for name in extra}
    return {"iteration": found.samples.iteration, "row": row, **values, "span": list(span), column: text}


def _show_matches(console: Console, matches: list[dict[str, Any]], total: int, pattern: Pattern[str]) -> None:
    from rich.text import Text

    for match in matches:
        text = str(list(match.values())[-1])
        start, end = match["span"]
        around = shorten(text[max(start - CONTEXT, 0) : end + CONTEXT], max_characters=2 * CONTEXT + end - start)
        head = f"{match['iteration']}:{match['row']}  reward {number(match.get('reward')) or '-'}  "
        line = Text(head)
        shown = Text(around)
        shown.highlight_regex(pattern, style="bold red")
        console.print(line + shown, soft_wrap=True)
    more = f", {len(matches)} shown (--limit 0 shows all)" if matches and len(matches) < total else ""
    console.print(f"{counted(total, 'sample')} match{'es' * (total == 1)}{more}", markup=False)


def stats(selection: Selection, *, columns: list[str], by: str | None) -> Answer:
    """Numbers and frequent texts of columns, over all rows that are chosen or in groups."""
    from storage.sample_stats import statistics

    known = selection.known()
    names = columns or [n for n in known if n in ("reward", "length", "finish_reason") or n.startswith("reward/")]
    groups = statistics(selection.search([*names, *([by] if by else [])]), names, by=by)
    document = {
        "run": str(selection.run.path),
        "by": by,
        "groups": [{"value": key, **group.to_json()} for key, group in groups.items()],
    }
    return Answer(document=finite(document), show=lambda console: _show_stats(console, groups, by))


def _show_stats(console: Console, groups: dict[Key, Group], by: str | None) -> None:
    header = (by or "", "rows", "column", "mean", "std", "min", "p5", "median", "p95", "max", "not finite")
    rows = []
    for key, group in groups.items():
        for name, described in group.to_json()["columns"].items():
            numbers: tuple[str, ...]
            if "most" in described:
                numbers = (", ".join(f"{shorten(t, max_characters=24)} {n}" for t, n in described["most"].items()),)
            else:
                numbers = tuple(number(described[part]) for part in header[3:10])
                numbers += (str(described["not_finite"] or ""),)
            label = "" if key is None else shorten(str(key))
            rows.append((label, str(group.rows), name, *numbers, *[""] * (8 - len(numbers))))
    print_table(console, header, rows)


def export(selection: Selection, destination: Path, *, columns: list[str]) -> Answer:
    """The chosen samples as one file that `datasets` opens."""
    from storage.sample_export import FORMATS
    from storage.sample_export import export as write

    if destination.suffix not in FORMATS:
        raise UserError(f"{destination}: the name must end in {' or '.join(FORMATS)}")
    if destination.is_dir():
        raise UserError(f"{destination}: is a folder; name a file")
    refuse_own_files(destination, "")
    types = _types(selection, columns)
    rows = write(destination, selection.search([], optional=list(types)), types)
    num_bytes = destination.stat().st_size
    document = {"file": str(destination), "rows": rows, "bytes": num_bytes, "columns": ["iteration", "row", *types]}
    return Answer(
        document=document,
        show=lambda console: console.print(
            f"{destination}: {counted(rows, 'sample')}, {size(num_bytes)}", markup=False
        ),
    )


def _types(selection: Selection, columns: list[str]) -> dict[str, tuple[str, str]]:
    """Kind and dtype of the asked columns, in their order; of all stored ones where none is asked for."""
    stored = stored_columns(RolloutStore(selection.run.rollouts), selection.iterations)
    computed = {name: ("token", "float32") for name, parts in TOKEN_DIFFERENCES.items() if set(parts) <= set(stored)}
    computed |= dict.fromkeys(("length", "tokens"), ("sample", "int64"))
    for name in columns:
        if name not in stored and name not in computed:
            raise unknown_column(name, [*stored, *computed])
    return {name: (stored | computed)[name] for name in columns} if columns else stored
