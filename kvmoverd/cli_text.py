"""What several commands print."""

from __future__ import annotations

from typing import Any


def print_tree(found: dict[str, Any], indent: str = "") -> None:
    """Settings or numbers, a line each, tables indented below their names."""
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{indent}{name}:")
            print_tree(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                print(f"{indent}{name}:")
                print_tree(entry, indent + "  ")
        else:
            print(f"{indent}{name}: {value}")
