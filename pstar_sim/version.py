"""The version of the package, as in pyproject.toml; files carry it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
