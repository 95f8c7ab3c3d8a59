"""`--help` of a benchmark that takes no flags."""

import argparse

__all__ = ["only_help"]


def only_help(measures: str | None) -> None:
    """Print `measures`, the docstring of the script, for `--help`, and end. Any other argument is an error."""
    argparse.ArgumentParser(description=measures, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
