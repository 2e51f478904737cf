"""What the repository is looked after with: not part of the package."""
