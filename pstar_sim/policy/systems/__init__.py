"""One file per published system. The ZeRO-3 systems share sharded.py and its parts: places of chunks (shards.py),
visits (sharded_visits.py), gathers.py and buckets.py. PatrickStar has separate files for memory and groups."""
