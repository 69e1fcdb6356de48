"""Publish three albums here: one that works, one with a photo that nobody can make out, and an empty one."""

from __future__ import annotations

from dramatiq_saga import FlowFailedError
from examples.fan_out.app import ALBUMS, publish_album

for album in ALBUMS:
    run = publish_album.run_sync(album)
    try:
        print(run.result())
    except FlowFailedError:
        print(f"{album}: {run.status}, rollback {run.rollback}")
        for step in run.actions():
            print(f"  step {step.sequence} {step.actor}: {step.status}")
