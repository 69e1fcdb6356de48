"""A card is declined, the order waits for its owner to top it up, and the same step runs again.

``python -m examples.declined_card`` plays three orders through: one that is topped up, one whose owner never has enough, and one whose
card was stolen, which nobody waits for.
"""
