"""Programs of engines: which are installed on this machine, and the HTTP server of the llama extra. I/O."""
