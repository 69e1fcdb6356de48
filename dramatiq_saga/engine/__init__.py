"""The verbs: claim, fence, replay, decide, roll back. No Dramatiq and no web in here; sender, clock and settings are handed in."""
