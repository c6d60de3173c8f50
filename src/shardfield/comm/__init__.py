"""Communication: every collective of shardfield starts here."""

from shardfield.comm.collectives import Traffic, record_traffic

__all__ = ["Traffic", "record_traffic"]
