"""Writes the JSON Schemas of the documents into a folder: `python -m autoscaler.schema docs/schema`. I/O.

`autoscaler.schema.json_schema` generates them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from autoscaler.schema.json_schema import render_schemas

if __name__ == "__main__":
    for file_name, text in render_schemas().items():
        Path(sys.argv[1], file_name).write_text(text)
