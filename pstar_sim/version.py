"""The version of the package, as in pyproject.toml; files carry it."""

__version__ = "0.1.0"
