"""Starts a fake engine: `python -m loadtest.fake_engine`, or, faster, `python -S -E loadtest/fake_engine`."""

import sys
from pathlib import Path

if not __package__:  # started with the path of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from loadtest.fake_engine.engine import main

if __name__ == "__main__":
    main(sys.argv[1:])
