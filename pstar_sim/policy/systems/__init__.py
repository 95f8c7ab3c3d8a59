"""Systems: one file per published system; sharded.py has the gathers and buckets that those of ZeRO-3 share."""
