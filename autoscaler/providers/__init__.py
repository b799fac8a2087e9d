"""Who adds capacity and takes it back. Each Provider knows one way, and none of the others, nor what is decided."""
