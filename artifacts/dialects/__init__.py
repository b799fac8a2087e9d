"""Dialects: how each tool that packs models says what the layers of a manifest are. One small module for each.

Nothing stands here, so that a dialect is imported by its own name; `artifacts.dialects.registry` has all of them.
"""
