"""Imports the configuration of other programs: KubeAI, Lingo, llama-swap, Ollama. Pure.

Keys with an equivalent are converted; model names stay the same for clients. All other keys are reported, with the fix.
Nothing is guessed silently, and every returned document is valid for `autoscaler.documents.parse`.
"""
