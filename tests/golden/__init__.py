"""Recorded histories of every construct, which every later version replays (C68; ``docs/reference/histories.md``)."""
