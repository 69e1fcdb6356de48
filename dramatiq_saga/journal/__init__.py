"""Two journals: what happened to a run (``history``), and what the engine absorbed on the way (``anomalies``)."""
