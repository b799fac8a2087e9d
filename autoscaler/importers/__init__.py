"""Other programs' configuration as Pilotlight's documents: KubeAI's, Lingo's, llama-swap's, Ollama's. Pure.

What has an equal is taken over, under the names that clients use; what has none is told, key by key, with what to do.
Nothing is guessed silently, and no document leaves here that `autoscaler.spec.load` would refuse.
"""
