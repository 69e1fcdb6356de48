"""Sweeps and repairs: finding again what messages have lost, and nothing that rows do not show."""
