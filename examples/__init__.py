"""Examples, one folder per idea. ``python -m examples.NAME`` runs one from the root of the checkout; each says how it starts."""
