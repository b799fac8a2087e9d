"""Dialects: one module per packaging tool, which interprets the layers of the tool's manifests.

This file is empty on purpose: import each dialect by its module; `artifacts.dialects.all_dialects` lists all of them.
"""
