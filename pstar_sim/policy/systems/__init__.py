"""One file per published system. The ZeRO-3 systems share sharded.py and its parts: shards.py, sharded_visits.py,
gathers.py and buckets.py."""
