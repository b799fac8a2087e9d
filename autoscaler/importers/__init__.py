"""Imports the configuration of other programs: KubeAI, Lingo, llama-swap, Ollama. Pure.

What has an equivalent is converted, under the names that clients use. All else is reported by key, with what to do.
Nothing is guessed silently, and no document is returned that `autoscaler.documents.load` would reject.
"""
