"""The version of the package, for what is written to files; that of pyproject.toml."""

__all__ = ["__version__"]

__version__ = "0.1.0"
