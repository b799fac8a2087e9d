"""`python -m loadtest`: the `load` commands by themselves, without the front door."""

from loadtest.cli import load

if __name__ == "__main__":
    load(prog_name="python -m loadtest")
