"""One step for each thing in a list, side by side; what one failure does to the others."""

from __future__ import annotations

from pathlib import Path

import dramatiq

from dramatiq_saga import Flow, SagaMiddleware, Settings, workflow
from dramatiq_saga.brokers import SQLiteBroker

broker = SQLiteBroker(Path(__file__).with_name("fan_out.db"))
broker.add_middleware(SagaMiddleware(settings=Settings.recommended()))
dramatiq.set_broker(broker)

ALBUMS = {
    "holidays": ["beach.jpg", "harbour.jpg", "lighthouse.jpg", "market.jpg"],
    "attic": ["aunt.jpg", "scratched.jpg", "uncle.jpg"],
    "empty": [],
}


@dramatiq.actor(max_retries=3)
def list_photos(album: str) -> list[str]:
    return ALBUMS[album]


@dramatiq.actor(max_retries=3, throws=ValueError)
def make_thumbnail(photo: str) -> str:
    if photo == "scratched.jpg":
        raise ValueError("nothing can be made out on scratched.jpg")
    return f"thumbnail of {photo}"


@dramatiq.actor(max_retries=3)
def delete_thumbnail(photo: str) -> None:
    print(f"deleting the thumbnail of {photo}")


@dramatiq.actor(max_retries=3)
def publish(album: str, thumbnails: list[str]) -> str:
    return f"{album}: {len(thumbnails)} photos"


@workflow
def publish_album(flow: Flow, album: str) -> str:
    photos = flow.run(list_photos, album)
    thumbnails = (
        flow.parallel(*(flow.action(make_thumbnail, photo).compensate_with(delete_thumbnail, photo) for photo in photos))
        .max_in_flight(2)  # the others wait for their turn without a message
        .run()
    )
    return flow.run(publish, album, thumbnails)
