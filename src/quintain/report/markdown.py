"""Rows of a table in Markdown."""

from __future__ import annotations


def table_header(*titles: object) -> list[str]:
    """The two lines above a table's rows."""
    return [table_row(*titles), table_row(*["---"] * len(titles))]


def table_row(*cells: object) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"
