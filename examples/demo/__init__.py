"""The demonstration: a shop on one SQLite file whose workers are killed in mid-order. ``python3 noxfile.py demo`` runs it."""
