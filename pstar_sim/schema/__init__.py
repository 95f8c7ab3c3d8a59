"""The one schema library: every file format and option is a declared type, which msgspec reads. A refused value gets a
message of one sentence.

`fields` declares the values that a field may have and puts them into words. `reading` turns values into a declared type
or a `Fault`. `records` does the same for dataclasses and their columns. `parsing` reads the text of TOML and JSON files
and the version at their head. Knows no format.
"""
