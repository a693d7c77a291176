"""This package's version, also recorded in every manifest."""

__version__ = "0.1.0"
