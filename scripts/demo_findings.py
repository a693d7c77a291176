"""The closing table of the demo: what was promised, and whether it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Findings", "print_findings"]


@dataclass(slots=True)
class Findings:
    """Rows of the closing table, and whether each promise is kept."""

    rows: list[tuple[str, str, bool | None]] = field(default_factory=list)

    def tell(self, name: str, value: object) -> None:
        """Add a row that promises nothing."""
        self.rows.append((name, str(value), None))

    def promise(self, name: str, value: object, *, kept: bool) -> None:
        """Add a row that must hold."""
        self.rows.append((name, str(value), kept))

    @property
    def broken(self) -> list[str]:
        """Names of the promises that are not kept."""
        return [name for name, _, kept in self.rows if kept is False]


def print_findings(findings: Findings) -> None:
    """Print the closing table."""
    width = max(len(name) for name, _, _ in findings.rows)
    signs = {None: "    ", True: "ok  ", False: "FAIL"}
    print()
    for name, value, kept in findings.rows:
        print(f"{signs[kept]}  {name:<{width}}  {value}")
    print(
        f"\n{'broken: ' + '; '.join(findings.broken) if findings.broken else 'every promise kept'}"
    )
