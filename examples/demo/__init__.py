"""A shop whose workers are killed in mid-order."""
