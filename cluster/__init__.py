"""PURE. Composition: configuration, command line, Serve application, simulation."""

__version__ = "0.1.0"
