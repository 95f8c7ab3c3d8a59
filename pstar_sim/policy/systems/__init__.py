"""Systems: one file per published system. Those of ZeRO-3 share sharded.py and what it is made of: where chunks are
(shards.py), visits (sharded_visits.py), gathers.py and buckets.py. PatrickStar's memory and groups have files too."""
