"""Waking a run: what every module that tells a run of something says to its row (DRIVE-2, DRIVE-7).

Whatever happens to a run raises its wake count in the transaction that records it: so a decision that was made without knowing of it
loses. :data:`WAKE` leaves the wake unseen, and whoever uses it puts a drive behind it. :data:`WAKE_SEEN` raises both counts: nothing
follows yet, so no drive is called for, and a decision in the making loses all the same. The run's row is locked before any other
row of the run, where the database has row locks.
"""

from __future__ import annotations

#: A run's revision and wake count are told from those of another one that had its id before it, and was pruned, by when it was created.
#: Whatever rests on having read the one finds nothing of the other: the first drives of both stand at the same counts. Parameters: when
#: the run that was read was created. (+ 0: it is found by its id, and by no index of moments.)
#: test_a_drive_of_a_pruned_run_decides_nothing_for_its_namesake
THIS_RUN = "created_at + 0 = ?"

_LIVE = "WHERE id = ? AND ended_at IS NULL AND status <> 'rolling_back'"

#: Parameters: the run.
LOCK_RUN = "SELECT revision FROM {flow_runs} WHERE id = ?{for_update}"

#: Parameters: now, the run.
WAKE = f"UPDATE {{flow_runs}} SET wakes = wakes + 1, woken_at = COALESCE(woken_at, ?) {_LIVE}"

#: Parameters: the run.
WAKE_SEEN = f"UPDATE {{flow_runs}} SET wakes = wakes + 1, wakes_seen = wakes_seen + 1 {_LIVE}"
