"""One training script, and how each cluster starts it: docs/clusters.md."""
