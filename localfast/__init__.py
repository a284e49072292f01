"""localfast: a local model server. Importing the package is cheap and starts nothing."""

__version__ = "0.1.0"
