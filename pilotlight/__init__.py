"""The command line, and the only package that assembles processes from the others. No other package imports it."""

PILOTLIGHT = True
__version__ = "0.1.0"
