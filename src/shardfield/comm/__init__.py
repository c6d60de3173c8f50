"""Communication: every collective of shardfield starts here."""

import atexit

from shardfield.comm.collectives import Traffic, record_traffic
from shardfield.comm.ending import wait_for_workers

__all__ = ["Traffic", "record_traffic"]

atexit.register(wait_for_workers)
