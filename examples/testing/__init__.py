"""Tests of a workflow that takes a month: no server, no worker, and done in a moment."""
