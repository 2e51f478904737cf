"""An HTTP server of completions over one mesh, and a client that loads it."""
