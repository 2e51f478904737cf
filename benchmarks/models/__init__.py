"""The four models in plain torch: nothing here imports JAX, so every contestant can train them."""
