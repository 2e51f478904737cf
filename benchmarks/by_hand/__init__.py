"""The same four models and their training steps, written by hand in JAX.

This is what a JAX user would write: dicts of arrays, `jax.nn`, one jitted step that donates what it
replaces and says how what it returns is laid out. It stands for "as fast as JAX gets".
"""
