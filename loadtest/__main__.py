"""`python -m loadtest`: the `load` commands without the `pilotlight` command."""

from loadtest.cli import load

if __name__ == "__main__":
    load(prog_name="python -m loadtest")
